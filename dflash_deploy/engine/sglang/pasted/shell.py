"""Shell text read into commands: quoting, variables, arrays. Nothing is run and nothing is looked up.

What only a shell could tell (command substitution, variables set elsewhere) stays in the words as written
and is named as unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from dflash_deploy.engine.sglang.pasted.words import (
    MAX_WORDS,
    Growth,
    Notes,
    Statement,
    Word,
    shown,
    too_large,
)

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]\s]{0,60}\])?(?P<add>\+?)=")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|()<>]+")
_CONTINUATION = re.compile(r"\\\n")
_BROKEN_CONTINUATION = re.compile(r"\\[ \t]+(?:#[^\n]*)?(?:\n|$)")
_OTHER_CONTINUATION = re.compile(r"(?:\^|`)[ \t]*\n")
_REDIRECTION = re.compile(r"&>>?|<<<|<<-?|>>|>&|<&|>\||<>|<|>")
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|[;&|()\n]")
_HEREDOC = re.compile(r"[ \t]*(['\"\\]?)(?P<end>[A-Za-z0-9_.-]{1,60})\1?")
_SIMPLE_PARAMETER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?$!-]")
_BRACED = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:\[(?P<item>@|\*|\d{1,4})\])?(?P<operator>:?[-=+?])?(?P<rest>.*)",
    re.DOTALL,
)
_KEYWORDS = frozenset({"then", "else", "elif", "do", "!", "{", "}", "time", "if", "while", "until", "coproc"})
_OPENING = frozenset({"if", "while", "until", "for", "case", "select"})
_CLOSING = frozenset({"fi", "done", "esac"})
_DECLARING = frozenset({"export", "declare", "typeset", "local", "readonly"})
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\x1b"}
_MAX_DEPTH = 12

Variables = dict[str, tuple[Word, ...]]


class Shell:
    """One text, read command by command.

    Attributes:
        variables: set by the text until now; an array has several words.
        exported: names of those that a started program sees.
        here_documents: texts that the script writes somewhere, such as another script.
    """

    def __init__(self, text: str, notes: Notes, variables: Mapping[str, str] | None = None) -> None:
        self.variables: Variables = {name: (Word(value),) for name, value in (variables or {}).items()}
        self.exported: set[str] = set(self.variables)
        self.here_documents: list[str] = []
        self._text = text
        self._at = 0
        self._line = 1
        self._counted = 0
        self._notes = notes
        self._conditions = 0
        self._next_conditional = False
        self._pending_documents: list[str] = []
        self._growth = Growth("the command with its variables")
        self._made_words = 0
        self._unclosed = _Unclosed()

    def statements(self) -> Iterator[Statement]:
        """The commands, in the order they stand. A flag that begins a line belongs to the command above."""
        held: Statement | None = None
        while self._at < len(self._text):
            statement, ended_by_line = self._statement()
            if statement is None:
                continue
            first = statement.words[0].text
            if held is not None and re.match(r"--[A-Za-z]", first):
                self._notes.add(
                    f"line {statement.line} begins with {shown(first, 40)}: a shell ends the command before "
                    "it, as a backslash is missing or a comment or an empty line stands between; read as one"
                )
                held = Statement(held.words + statement.words, held.env, held.line)
                continue
            if held is not None:
                yield held
            held = statement
            if not ended_by_line:
                yield held
                held = None
        if held is not None:
            yield held

    def env(self) -> dict[str, str]:
        """Exported variables as they stand now."""
        return {
            name: " ".join(word.text for word in self.variables[name])
            for name in sorted(self.exported)
            if name in self.variables
        }

    # One command -------------------------------------------------------------------------------------------

    def _statement(self) -> tuple[Statement | None, bool]:
        """The next command (None for one that only sets variables), and whether a line's end ended it."""
        words: list[Word] = []
        env: dict[str, str] = {}
        declaring = False
        line = 0
        conditional, self._next_conditional = self._next_conditional, False
        while True:
            self._skip_blanks()
            if self._at >= len(self._text):
                break
            line = line or self._line_here()
            redirection = _REDIRECTION.match(self._text, self._at)
            if redirection is not None:
                self._redirect(redirection)
                continue
            operator = _OPERATOR.match(self._text, self._at)
            if operator is not None:
                self._at = operator.end()
                self._after(operator[0], words)
                if operator[0] == "\n":
                    self._skip_documents()
                return self._finished(words, env, line), operator[0] == "\n"
            assignment = _ASSIGNMENT.match(self._text, self._at)
            if assignment is not None and (not words or declaring):
                self._assign(assignment, env, conditional or self._conditions > 0, exporting=declaring)
                continue
            start = self._at
            found = self._word()
            if self._at == start:  # pragma: no cover -- every character is one of the above
                self._at += 1
            if self._ends_in_descriptor(start, found):
                continue
            if not words and len(found) == 1 and not found[0].unknown:
                text = found[0].text
                if text in _OPENING:
                    self._conditions += 1
                elif text in _CLOSING:
                    self._conditions = max(0, self._conditions - 1)
                    continue
                if text in _KEYWORDS:
                    continue
            declaring = declaring or (not words and bool(found) and found[0].text in _DECLARING)
            if declaring and words and found and _NAME.fullmatch(found[0].text):
                self.exported.add(found[0].text)
            words += found
        return self._finished(words, env, line), True

    def _finished(self, words: list[Word], env: Mapping[str, str], line: int) -> Statement | None:
        if not words or words[0].text in _DECLARING:
            return None
        return Statement(tuple(words), {**self.env(), **env}, line)

    def _after(self, operator: str, words: list[Word]) -> None:
        tests = bool(words) and words[0].text in ("[", "[[", "test")
        self._next_conditional = operator == "||" or (operator == "&&" and tests)

    def _ends_in_descriptor(self, start: int, found: list[Word]) -> bool:
        """A number right before ``>`` or ``<``, as in ``2>&1``, is no word."""
        number = self._text[start : self._at]
        return bool(found) and number.isdigit() and self._text[self._at : self._at + 1] in ("<", ">")

    def _redirect(self, redirection: re.Match[str]) -> None:
        self._at = redirection.end()
        if redirection[0].startswith("<<") and redirection[0] != "<<<":
            end = _HEREDOC.match(self._text, self._at)
            if end is not None:
                self._pending_documents.append(end["end"])
                self._at = end.end()
                return
        self._skip_blanks()
        if self._at < len(self._text) and not _OPERATOR.match(self._text, self._at):
            start = self._at
            self._word()
            self._at = max(self._at, start)

    def _skip_documents(self) -> None:
        for end in self._pending_documents:
            closing = re.compile(rf"^[ \t]*{re.escape(end)}[ \t]*$", re.MULTILINE).search(
                self._text, self._at
            )
            stop = closing.start() if closing else len(self._text)
            self.here_documents.append(self._text[self._at : stop])
            self._at = closing.end() if closing else len(self._text)
        self._pending_documents.clear()

    def _assign(
        self, assignment: re.Match[str], env: dict[str, str], conditional: bool, *, exporting: bool
    ) -> None:
        name = assignment["name"]
        line = self._line_here()
        self._at = assignment.end()
        array = self._text[self._at : self._at + 1] == "("
        value = self._array() if array else (self._one_word(),)
        if exporting:
            self.exported.add(name)
        known = self.variables.get(name)
        if conditional:
            taken = known is None
            self._notes.add(
                f"line {line} sets {name} only under a condition: planned {'with' if taken else 'without'} it"
            )
            if not taken:
                return
        if assignment["add"] and known is not None:
            value = known + value if array else (_joined(known[0], value[0]), *known[1:]) if known else value
        self._made(value)
        self.variables[name] = value
        env[name] = " ".join(word.text for word in value)

    def _array(self) -> tuple[Word, ...]:
        self._at += 1
        words: list[Word] = []
        while self._at < len(self._text):
            self._skip_blanks()
            letter = self._text[self._at : self._at + 1]
            if letter == ")":
                self._at += 1
                break
            if letter in "\n;&|(<>":
                self._at += 1
                continue
            words += self._word()
        return tuple(words)

    # One word ----------------------------------------------------------------------------------------------

    def _skip_blanks(self) -> None:
        while self._at < len(self._text):
            letter = self._text[self._at]
            if letter in " \t\f\v" or (letter.isspace() and letter != "\n"):
                self._at += 1
            elif letter == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            elif match := _CONTINUATION.match(self._text, self._at):
                self._at = match.end()
            elif match := _BROKEN_CONTINUATION.match(self._text, self._at):
                self._notes.add(
                    f"line {self._line_here()}: something follows the backslash, so that a shell ends the "
                    "command there; read as going on in the next line"
                )
                self._at = match.end()
            elif match := _OTHER_CONTINUATION.match(self._text, self._at):
                self._notes.add(
                    "^ and ` at the end of a line are read as the backslash that Linux shells want"
                )
                self._at = match.end()
            else:
                return

    def _one_word(self) -> Word:
        """The value of an assignment: one word, whatever its variables hold."""
        words = self._word(split=False)
        if not words:
            return Word("", (), self._line_here())
        return words[0] if len(words) == 1 else _joined(*words, between=" ")

    def _word(self, *, split: bool = True) -> list[Word]:
        """The word that begins here; variables may make several of it, or none."""
        line = self._line_here()
        done: list[Word] = []
        piece = _Piece(line)
        text = self._text
        while self._at < len(text):
            letter = text[self._at]
            if match := _PLAIN.match(text, self._at):
                piece.add(match[0])
                self._at = match.end()
            elif letter == "\\":
                if _CONTINUATION.match(text, self._at):
                    self._at += 2
                    continue
                if _BROKEN_CONTINUATION.match(text, self._at):
                    break
                piece.add(text[self._at + 1 : self._at + 2])
                self._at += 2
            elif letter == "'":
                piece.add(self._between("'", "'"))
            elif letter == '"':
                self._double_quoted(piece, done)
            elif letter in "$`":
                self._expansion(piece, done, split=split)
            else:
                break
        if piece.begun:
            done.append(piece.word())
        self._made(done)
        return done

    def _between(self, opening: str, closing: str) -> str:
        """What stands up to ``closing``; an opening that is never closed is a letter like any other."""
        start = self._at + len(opening)
        end = -1 if self._unclosed.hopeless(opening) else self._text.find(closing, start)
        if end < 0:
            self._unclosed.add(opening)
            self._notes.add(f"line {self._line_here()}: a {opening} is never closed")
            self._at = start
            return opening
        self._at = end + len(closing)
        return self._text[start:end]

    def _double_quoted(self, piece: _Piece, done: list[Word]) -> None:
        hopeless = self._unclosed.hopeless('"')
        end = -1 if hopeless else _closing_quote(self._text, self._at + 1, self._unclosed)
        if end < 0:
            self._unclosed.add('"')
            self._notes.add(f'line {self._line_here()}: a " is never closed')
            piece.add('"')
            self._at += 1
            return
        inside, line = self._text[self._at + 1 : end], self._line_here()
        self._at = end + 1
        array = re.fullmatch(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[@\](?::?[-+][^{}]{0,200})?\}", inside)
        if array and array[1] in self.variables:
            self._made(self.variables[array[1]])
            _spread(self.variables[array[1]], piece, done)
            return
        piece.quoted()
        text, unknown = self.expanded(inside, line=line, quoted=True)
        piece.add(text, unknown)

    def _expansion(self, piece: _Piece, done: list[Word], *, split: bool) -> None:
        raw, self._at = _expression(self._text, self._at, self._unclosed)
        if raw in ("$", "`", "$(", "${"):
            piece.add(raw)
            return
        if raw.startswith("$'"):
            piece.add(_ansi(raw[2:-1]))
            return
        if raw == '$"':
            self._at -= 1
            return
        array = re.fullmatch(
            r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}|\$([A-Za-z_][A-Za-z0-9_]*)|\$\{([A-Za-z_][A-Za-z0-9_]*)\}",
            raw,
        )
        name = next((part for part in array.groups() if part), None) if array else None
        held = self.variables.get(name) if name else None
        if held is not None and split:
            words = held if array and array[1] else held[:1]
            self._made(words)
            _spread(
                [Word(part, word.unknown, self._line_here()) for word in words for part in word.text.split()],
                piece,
                done,
            )
            return
        text, unknown = self._value(raw, line=self._line_here(), depth=0)
        parts = text.split() if split and not unknown else [text] if text else []
        if text or not split:
            _spread([Word(part, unknown, self._line_here()) for part in parts or [text]], piece, done)

    # Variables ---------------------------------------------------------------------------------------------

    def expanded(
        self, text: str, *, line: int = 0, quoted: bool = False, depth: int = 0
    ) -> tuple[str, tuple[str, ...]]:
        """A text with its variables replaced, and the parts of it that are not known."""
        pieces: list[str] = []
        unknown: list[str] = []
        at = 0
        unclosed = _Unclosed()
        while at < len(text):
            letter = text[at]
            if letter == "\\" and at + 1 < len(text) and (not quoted or text[at + 1] in '$`"\\\n'):
                pieces.append("" if text[at + 1] == "\n" else text[at + 1])
                at += 2
            elif letter in "$`":
                raw, at = _expression(text, at, unclosed, quoted=True)
                value, missing = self._value(raw, line=line, depth=depth)
                pieces.append(value)
                unknown += missing
            elif letter in "'\"" and not quoted:
                at += 1
            else:
                end = next((one for one in range(at + 1, len(text)) if text[one] in "\\$`'\""), len(text))
                pieces.append(text[at:end])
                at = end
        made = "".join(pieces)
        self._growth.add(len(made))
        return made, tuple(unknown)

    def _value(self, raw: str, *, line: int, depth: int) -> tuple[str, tuple[str, ...]]:
        """What ``$NAME``, ``${NAME…}``, ``$(…)`` or `` `…` `` stands for."""
        if raw in ("$", "`", "${", "$("):
            return raw, ()
        inside = raw[2:-1] if raw.startswith("${") else raw[1:]
        braced = _BRACED.fullmatch(inside) if not raw.startswith(("$(", "`")) else None
        if braced is None or depth > _MAX_DEPTH:
            return raw, (raw,)
        name, operator, rest = braced["name"], braced["operator"], braced["rest"]
        if rest and operator is None:
            return raw, (raw,)
        held = self.variables.get(name)
        if held is not None and braced["item"] and braced["item"].isdigit():
            item = int(braced["item"])
            held = held[item : item + 1]
        elif held is not None and not braced["item"]:
            held = held[:1]
        text = None if held is None else " ".join(word.text for word in held)
        missing = () if held is None else tuple(part for word in held for part in word.unknown)
        empty_counts = bool(operator) and str(operator).startswith(":")
        given = text is not None and not (empty_counts and not text)
        kind = operator[-1] if operator else ""
        if kind == "+":
            return self.expanded(rest, line=line, depth=depth + 1) if given else ("", ())
        if given:
            self._growth.add(len(text or ""))
            return text or "", missing
        if kind in ("-", "="):
            value, unknown = self.expanded(rest, line=line, depth=depth + 1)
            if kind == "=":
                self.variables[name] = (Word(value, unknown, line),)
            return value, unknown
        return (text, missing) if text is not None else (raw, (raw,))

    # Bounds ------------------------------------------------------------------------------------------------

    def _line_here(self) -> int:
        if self._at > self._counted:
            self._line += self._text.count("\n", self._counted, self._at)
            self._counted = self._at
        return self._line

    def _made(self, words: list[Word] | tuple[Word, ...]) -> None:
        self._made_words += len(words)
        self._growth.add(sum(len(word.text) for word in words))
        if self._made_words > MAX_WORDS:
            raise too_large("the command with its variables")


class _Unclosed:
    """Brackets and quotes that are never closed: after some of a kind, no more are looked for.

    Each search runs to the end of the text, so that without a bound many of them would take for ever.
    """

    _SEARCHES = 32

    def __init__(self) -> None:
        self._found: Counter[str] = Counter()

    def add(self, opening: str) -> None:
        """One more has no end."""
        self._found[opening] += 1

    def hopeless(self, opening: str) -> bool:
        """No end is to be looked for."""
        return self._found[opening] >= self._SEARCHES


class _Piece:
    """A word while it is put together."""

    def __init__(self, line: int) -> None:
        self.begun = False
        self._line = line
        self._texts: list[str] = []
        self._unknown: list[str] = []

    def add(self, text: str, unknown: tuple[str, ...] = ()) -> None:
        self.begun = True
        self._texts.append(text)
        self._unknown += unknown

    def quoted(self) -> None:
        """Even with nothing in it, it is a word."""
        self.begun = True

    def word(self) -> Word:
        return Word("".join(self._texts), tuple(self._unknown), self._line)

    def restart(self) -> None:
        self.begun = False
        self._texts, self._unknown = [], []


def _spread(words: list[Word] | tuple[Word, ...], piece: _Piece, done: list[Word]) -> None:
    """Several words in the place of one: the first goes on with what stands before, the last is left open."""
    for at, word in enumerate(words):
        if at:
            done.append(piece.word())
            piece.restart()
        piece.add(word.text, word.unknown)


def _joined(*words: Word, between: str = "") -> Word:
    return Word(
        between.join(word.text for word in words),
        tuple(part for word in words for part in word.unknown),
        words[0].line,
    )


def _closing_quote(text: str, at: int, unclosed: _Unclosed) -> int:
    """Place of the ``"`` that ends what begins at ``at``; -1 where there is none."""
    while at < len(text):
        match = re.compile(r'[^"\\$`]+').match(text, at)
        if match:
            at = match.end()
        elif text[at] == '"':
            return at
        elif text[at] == "\\":
            at += 2
        else:
            _, at = _expression(text, at, unclosed, quoted=True)
    return -1


def _expression(text: str, at: int, unclosed: _Unclosed, *, quoted: bool = False) -> tuple[str, int]:
    """The ``$…`` or `` `…` `` that begins at ``at`` as written, and where the text goes on."""
    if text[at] == "`":
        end = -1 if unclosed.hopeless("`") else text.find("`", at + 1)
        if end < 0:
            unclosed.add("`")
            return "`", at + 1
        return text[at : end + 1], end + 1
    following = text[at + 1 : at + 2]
    if following in ("(", "{"):
        opening = "$" + following
        end = -1 if unclosed.hopeless(opening) else _closing_bracket(text, at + 1)
        if end < 0:
            unclosed.add(opening)
            return opening, at + 2
        return text[at : end + 1], end + 1
    if not quoted and following == "'":
        end = at + 2
        while end < len(text) and text[end] != "'":
            end += 2 if text[end] == "\\" else 1
        if end < len(text):
            return text[at : end + 1], end + 1
        return "$", at + 1
    if not quoted and following == '"':
        return '$"', at + 2
    match = _SIMPLE_PARAMETER.match(text, at + 1)
    return (text[at : match.end()], match.end()) if match else ("$", at + 1)


def _closing_bracket(text: str, at: int) -> int:
    """Place of the bracket that closes the one at ``at``; -1 where there is none."""
    opening = text[at]
    closing = ")" if opening == "(" else "}"
    depth = 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif letter in "'\"" and opening == "(":
            # In ${…} quotes count for nothing where the whole stands in quotes, as it mostly does.
            end = text.find(letter, at + 1)
            at = end if end > 0 else at
        elif letter == opening:
            depth += 1
        elif letter == closing:
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


def _ansi(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: _ANSI.get(match[1], match[0]), text, flags=re.DOTALL)
