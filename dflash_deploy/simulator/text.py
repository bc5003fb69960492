"""Prompts measured and answers made up: the same prompt always gets the same words, whatever serves it."""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, field

_PIECE = re.compile(r"[぀-ヿ㐀-鿿가-힯]|[^\W_]+|[^\w\s]|_")
_CJK = re.compile(r"[぀-ヿ㐀-鿿가-힯]")
_PIECE_CHARS = 7

_CODE = re.compile(
    r"```|\b(def|class|function|code|python|rust|javascript|sql|implement|program|algorithm|regex)\b"
    r"|程式|函式|代碼",
    re.IGNORECASE,
)
_MATH = re.compile(
    r"\b(prove|solve|equations?|integral|derivative|calculate|compute|how many|probability|sum of|math\w*)\b"
    r"|\d\s*[+*/=^]\s*\d|證明|計算|方程|多少",
    re.IGNORECASE,
)
_PROSE = re.compile(
    r"\b(story|essay|poem|novel|narrative|fiction|diary|letter|fairy tale)\b|故事|散文|小說|詩",
    re.IGNORECASE,
)

_ENGLISH = """
the a this that each one some any most such where when while because although so then thus also still only
first second next last early late small large whole single common simple careful quick steady clear exact
plain direct open local shared known given likely useful result reason answer question example case part
step point order value number change cause effect method model system process server memory cache token
request reader writer worker queue table record page line word sentence section chapter city river field
house garden road bridge school market season summer winter morning evening light water stone paper metal
is are was were has had can may must should would keeps takes gives makes shows means needs holds moves
starts ends returns follows explains describes compares measures improves depends remains becomes appears
of in on at by for from with without between under over after before during through against about into
and or but if as than not more less very often always never again together apart almost nearly
"""
_CHINESE = """
這 是 的 在 有 個 與 以 為 可 用 時 先 再 後 然後 因此 所以 但 如果 就 會 能 需要 系統 模型 記憶體 步驟 方法
結果 問題 原因 例子 部分 簡單 清楚 重要 不同 相同 首先 其次 最後 使用 處理 測量 比較 說明 改善 速度 時間 服務
資料 文字 城市 河流 花園 早晨 冬天 學校 市場 道路 我們 他們 每 一 兩 三 多 少 高 低 快 慢
"""
_WORDS = tuple(_ENGLISH.split())
_CJK_WORDS = tuple(_CHINESE.split())
_NOISE = "\ufffd\u0000ÃÂ¤§¶~#|{}<>\\^`¨øþ"


def count_tokens(text: str) -> int:
    """Tokens of a text, about as the model's own tokenizer counts."""
    return sum(1 + (len(piece) - 1) // _PIECE_CHARS for piece in _PIECE.findall(text))


def task_of(prompt: str) -> str:
    """What kind of work a prompt asks for, as far as acceptance goes."""
    head = prompt[-4000:]
    if _CODE.search(head):
        return "code"
    if _MATH.search(head):
        return "math"
    if _PROSE.search(head):
        return "prose"
    return "instruction"


def fingerprint(*parts: str) -> int:
    """A number that stands for a prompt."""
    digest = hashlib.blake2b("\x1f".join(parts).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass
class Answer:
    """The words of one answer, made as they are taken.

    Attributes:
        fault: ``garbage`` or ``repeat`` or empty.
    """

    prompt: str
    seed: int
    fault: str = ""
    _rng: random.Random = field(init=False)
    _words: tuple[str, ...] = field(init=False)
    _joint: str = field(init=False)
    _left: int = field(init=False, default=0)
    _start: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self._rng = random.Random(fingerprint(self.prompt, f"answer/{self.seed}"))  # noqa: S311 - not for secrets
        letters = sum(1 for ch in self.prompt[:2000] if ch.isalpha())
        cjk = len(_CJK.findall(self.prompt[:2000])) * 2 > letters > 0
        self._words = _CJK_WORDS if cjk else _WORDS
        self._joint = "" if cjk else " "

    def take(self, tokens: int) -> str:
        """The next words, one a token."""
        return "".join(self._token() for _ in range(tokens))

    def _token(self) -> str:
        rng = self._rng
        if self.fault == "garbage":
            return "".join(rng.choice(_NOISE) for _ in range(rng.randint(1, 5)))
        if self.fault == "repeat":
            return " the same"
        first, self._start = self._start, False
        if self._left > 0:
            self._left -= 1
            joint = "" if first else self._joint
            return joint + self._words[int(rng.random() * len(self._words))]
        self._left = 6 + int(rng.random() * 16)
        if first:
            return self._words[int(rng.random() * len(self._words))].capitalize()
        if not self._joint:
            return "。" if rng.random() < 0.9 else "。\n\n"
        return "." if rng.random() < 0.9 else ".\n\n"
