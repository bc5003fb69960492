"""A model of some megabytes and its tokenizer: enough for a real server to serve.

Run by the serving interpreter (``tiny_model.py FOLDER``). The same script makes the same model every time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"
"""Plain English of a settled wording, to learn words from."""

END, START_TURN, END_TURN = SPECIAL = ("<|end|>", "<|turn|>", "<|done|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    f"{START_TURN}" "{{ message.role }}\n{{ message.content }}" f"{END_TURN}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}" f"{START_TURN}assistant\n" "{% endif %}"
)  # fmt: skip


def main(folder: Path) -> None:
    """Make both in ``folder``."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    make_model(tokenizer).save_pretrained(folder)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level pairs, so that every text can be written in it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LICENSE.read_text().splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=END, eos_token=END_TURN, chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 in miniature that writes endless readable nonsense.

    Wholly random weights would fall into loops and half characters, which the output checks rightly refuse.
    So every token has two words that may follow it, and attention over the text so far decides between them:
    n-gram speculation has something to find, and a wrong attention shows in the text.
    """
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen3ForCausalLM(config)
    words = spoken_words(tokenizer)
    with torch.no_grad():
        meaning = model.model.embed_tokens.weight
        meaning.copy_(torch.randn_like(meaning))
        # What is no such word has a logit of zero and never wins, the end of the turn among them: answers
        # have the length asked for.
        model.lm_head.weight.zero_()
        for token in range(len(tokenizer)):
            for choice in torch.randint(len(words), (2,)).tolist():
                model.lm_head.weight[words[choice]] += meaning[token] / config.hidden_size**0.5
        for layer in model.model.layers:
            # Sharp attention, to a few places and not to the mean of all: else the choice hardly changes.
            layer.self_attn.q_norm.weight.fill_(2)
    return model.to(torch.bfloat16)


def spoken_words(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The tokens that answers are made of: few, so that pairs of them come again."""
    by_token = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return [number for token, number in by_token if re.fullmatch("Ġ[a-z]{3,}", token)][-128:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
