"""Count the machine instructions per number read of the kernels that decode with rotated keys, without a GPU.

    python benchmarks/decode_instructions.py
    python benchmarks/decode_instructions.py --all      # every layout of decode_sweep.py

Triton compiles for compute capability 9.0 (H100, H200) and its own tools disassemble the result; nothing runs. `Sums` is
counted for heads of 64, `Config` for four query heads of 128 on a key head: the two target shapes. The time without stalls is
numbers read x instructions / (32 lanes x 4 a cycle x multiprocessors x clock).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from decode_sweep import ALONE, SHARED
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headtohead.kernels.attention.decode_rope_triton import Sums, products, sums
from headtohead.kernels.attention.decode_triton import CONFIGS, Config

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {"q_at": "*bf16", "kv_at": "*bf16", "table_at": "*fp32", "mix_at": "*fp32", "log_at": "*fp32"}
POINTERS |= {"place_at": "*i64"}


def compile_for_hopper(config: Config | Sums) -> tuple[Any, float]:
    """Return the compiled kernel and how many numbers a lane reads per loop iteration."""
    if isinstance(config, Sums):
        kernel, block = sums, config.block(128)
        settings = {"TILES": config.tiles, "ROWS": block // config.tiles, "AHEAD": config.ahead}
        settings |= {"DIM": 64, "BLOCK_D": 64, "KV_HEADS": 8}
        numbers = block * 64 / 32 / config.warps
    else:
        kernel = products
        settings = {
            "SHARE": 4,
            "BLOCK_Q": 16,
            "BLOCK": config.keys,
            "PRECISION": "ieee",
            "STAGES": config.stages,
        }
        settings |= {"DIM": 128, "BLOCK_D": 128, "KV_HEADS": 4}
        numbers = config.keys * 128 / 32 / config.warps
    settings |= {"PLACED": False, "COUNTED": False}
    names = [parameter.name for parameter in kernel.params]
    types = {name: POINTERS.get(name, "fp32" if name == "scale" else "i32") for name in names}
    types |= dict.fromkeys(settings, "constexpr")
    even = [
        index
        for index, name in enumerate(names)
        if types[name] not in ("fp32", "constexpr") and name != "turns"
    ]
    hints = {(index,): [["tt.divisibility", 16]] for index in even}
    options = {"num_warps": config.warps} | ({"maxnreg": config.registers} if config.registers else {})
    source = ASTSource(kernel, types, settings, hints)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options), numbers


def disassemble(cubin: bytes) -> tuple[int, int, list[str]]:
    """Return the registers and stack bytes per thread, and the instructions of the longest loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run(
                [TOOLS / "cuobjdump", flag, file.name], capture_output=True, text=True, check=True
            ).stdout
            for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    lines = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", code)]
    jumps = [
        (int(to[1], 16), at)
        for at, line in lines
        if "BRA" in line and (to := re.search(r"0x([0-9a-f]+)", line))
    ]
    start, end = max((jump for jump in jumps if jump[0] < jump[1]), key=lambda jump: jump[1] - jump[0])
    return int(found[1]), int(found[2]), [line for at, line in lines if start <= at <= end]


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="count every layout of the sweep, not only those in use"
    )
    layouts = [CONFIGS[True, True], CONFIGS[True, False]]
    if parser.parse_args().all:
        # Sums are counted at the first shape and products at the second; the number of programs does not change the code.
        wanted = [config for config in ALONE if isinstance(config, Sums)] + SHARED
        layouts = list({dataclasses.replace(config, programs=0): config for config in wanted}.values())
    for config in layouts:
        kernel, numbers = compile_for_hopper(config)
        registers, stack, loop = disassemble(kernel.asm["cubin"])
        kinds = collections.Counter(re.sub(r"^@\S+\s+", "", line).split()[0].split(".")[0] for line in loop)
        common = ", ".join(f"{name} {count}" for name, count in kinds.most_common(12))
        print(
            f"{config}\n  {len(loop) / numbers:.2f} instructions per number, {registers} registers, {stack} bytes of stack"
        )
        print(
            f"  {kernel.metadata.shared} bytes shared, {kinds['BAR']} barriers per iteration; {common}",
            flush=True,
        )


if __name__ == "__main__":
    main()
