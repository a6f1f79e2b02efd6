"""A small random Qwen3, a character tokenizer and a verifiable task: `python make_assets.py FOLDER`.

The task: the prompt says a digit, the response is scored by the share of its characters that are this digit.
"""

import random
import sys
from pathlib import Path

VOCABULARY = ["<pad>", "<eos>", "<user>", "<assistant>", *"0123456789abcdefghijklmnopqr"]  # 32 tokens
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_data(folder: Path) -> None:
    import pandas

    random.seed(0)
    rows = []
    for index in range(512):
        digit = random.choice("0123")
        rows.append(
            {
                "data_source": "digit",
                "prompt": [{"role": "user", "content": f"{digit}"}],
                "ability": "copy",
                "reward_model": {"style": "rule", "ground_truth": digit},
                "extra_info": {"index": index},
            }
        )
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    pandas.DataFrame(rows[:16]).to_parquet(folder / "val.parquet")


def make_assets(folder: Path) -> None:
    """Write model/ (weights, config, tokenizer), train.parquet and val.parquet."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "model")
    make_model(folder / "model")
    make_data(folder)


if __name__ == "__main__":
    make_assets(Path(sys.argv[1]))
