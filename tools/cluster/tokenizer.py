"""A byte-level tokenizer with one token per byte.

Token id ``i`` below 256 stands for the byte ``i``, and there are no merges, so that encoding is a
function of single bytes: text -> ids -> text is the identity for every string, and ids -> text ->
ids is the identity for all ids in ``GENERATED_IDS``. A chat history that is rendered again
therefore has exactly the token ids that were generated.
"""

from __future__ import annotations

import json
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

BYTE_COUNT = 256
VOCAB_SIZE = BYTE_COUNT + len(SPECIAL_TOKENS)
END_OF_TEXT_ID, TURN_START_ID, TURN_END_ID = range(BYTE_COUNT, VOCAB_SIZE)

# Printable ASCII and the newline. Bytes above 0x7F are left out because a random sequence of them
# is no valid UTF-8; the bar because without it no generated text can spell a special token.
GENERATED_IDS = tuple(b for b in (0x0A, *range(0x20, 0x7F)) if b != ord("|"))

# The rendering of a history is a prefix of the rendering of every longer history, and the
# generation prompt followed by an answer is what that answer's own message renders to.
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{{- message['content'] if message['content'] else '' }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' + (call['function'] | tojson) }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into an existing ``folder``.

    ``max_length`` (tokens) is what the tokenizer states as the model's limit.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2) + "\n", encoding="utf-8"
    )


def _byte_characters() -> list[str]:
    """The character that byte-level BPE uses in place of each byte, in byte order.

    Source of the rule: GPT-2's encoder. Bytes that print stand for themselves, the others take
    the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters: list[str] = []
    spare = BYTE_COUNT
    for byte in range(BYTE_COUNT):
        if byte in printable:
            characters.append(chr(byte))
        else:
            characters.append(chr(spare))
            spare += 1
    return characters
