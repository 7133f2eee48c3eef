"""The Triton kernel against the definition. Run by `test_fingerprint_kernel.py` in a process of its own, because the
interpreter must be switched on before Triton is first imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from truestep.fingerprint.reference import fingerprint_bytes
from truestep.fingerprint.sums import Fingerprint
from truestep.fingerprint.tensors import raw_bytes
from truestep.fingerprint.triton import triton_sums

VECTORS = json.loads((Path(__file__).parents[1] / "detection" / "fingerprint_vectors.json").read_text())
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def settled(sums: torch.Tensor, raws: list[torch.Tensor]) -> list[Fingerprint]:
    return [Fingerprint.from_sums(*row, length_bytes=raw.numel()) for row, raw in zip(sums.tolist(), raws, strict=True)]


def expected(raws: list[torch.Tensor]) -> list[Fingerprint]:
    return [fingerprint_bytes(bytes(raw.tolist())) for raw in raws]


def test_the_interpreter_runs_the_kernel() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_stored_vectors_in_one_launch() -> None:
    raws = [torch.tensor(list(bytes.fromhex(vector["hex"])), dtype=torch.uint8) for vector in VECTORS]
    values = [str(value) for value in settled(triton_sums(raws), raws)]
    assert values == [vector["fingerprint"] for vector in VECTORS]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_odd_size_and_stride(dtype: torch.dtype) -> None:
    base = torch.randint(0, 2, (9, 7)).to(dtype)
    views = [base.flatten()[:size] for size in (0, 1, 2, 3, 33)]
    views += [base.t(), base[1:, 1:], base[::2], base.flatten()[1:], base[3, 2], base.expand(2, 9, 7)]
    raws = [raw_bytes(view) for view in views]
    assert settled(triton_sums(raws), raws) == expected(raws)


@pytest.mark.parametrize(("block_pairs", "span_blocks"), [(16, 1), (16, 3), (64, 8), (2048, 8)])
def test_tensors_of_many_blocks_and_any_block_size(block_pairs: int, span_blocks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = (1, 127, 128, 129, 0, 1000, 1024, 1031)
    raws = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]
    sums = triton_sums(raws, block_pairs=block_pairs, span_blocks=span_blocks)
    assert settled(sums, raws) == expected(raws)


def test_nothing_behind_a_tensors_end_is_read() -> None:
    """The same bytes with different neighbours have the same value."""
    storages = [torch.full((64,), neighbour, dtype=torch.uint8) for neighbour in (0, 255)]
    for storage in storages:
        storage[8:21] = torch.arange(13)
    raws = [storage[8:21] for storage in storages]
    first, second = settled(triton_sums(raws), raws)
    assert first == second == expected(raws)[0]


def test_only_empty_tensors_launch_nothing() -> None:
    raws = [torch.empty(0, dtype=torch.uint8)] * 2
    assert settled(triton_sums(raws), raws) == expected(raws)


def test_the_compiler_takes_the_kernel_for_a_real_gpu(tmp_path: Path) -> None:
    """The interpreter takes more than the compiler does; compiling needs no GPU."""
    code = (
        "import triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from truestep.fingerprint.triton import BLOCK_PAIRS, SPAN_BLOCKS, _sums_kernel\n"
        "names = ('pointers', 'lengths', 'tensor_of', 'span_of', 'results')\n"
        "signature = dict.fromkeys(names, '*i64') | {'BLOCK': 'constexpr', 'SPAN': 'constexpr'}\n"
        "constants = {'BLOCK': BLOCK_PAIRS, 'SPAN': SPAN_BLOCKS}\n"
        "source = ASTSource(fn=_sums_kernel, signature=signature, constexprs=constants)\n"
        "kernel = triton.compile(source, target=GPUTarget('cuda', 90, 32), options={'num_warps': 8})\n"
        "print(len(kernel.asm['cubin']), kernel.asm['ptx'].count('.local'))\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    size, spills = map(int, done.stdout.split()[-2:])
    assert size > 0
    assert spills == 0, "registers spill to local memory"
