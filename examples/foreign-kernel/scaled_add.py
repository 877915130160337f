"""Writes kernels/templates/scaled_add.ptx: `a + by * b` in Triton, for sm_80 and later. Needs no GPU."""

from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def scaled_add(a, b, y, by, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    first = tl.load(a + at, mask=there).to(tl.float32)
    second = tl.load(b + at, mask=there).to(tl.float32)
    tl.store(y + at, (first + by * second).to(tl.bfloat16), mask=there)


signature = {"a": "*bf16", "b": "*bf16", "y": "*bf16", "by": "fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(scaled_add, signature=signature, constexprs={"BLOCK": 1024})
compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": 4})
out = Path(__file__).parent / "kernels/templates/scaled_add.ptx"
# Line information names files of the machine that it was made on.
lines = [l for l in compiled.asm["ptx"].splitlines() if not l.strip().startswith((".loc", ".file", "//"))]
text = "\n".join(lines)
out.write_text(text[: text.index(".section")] + "\n" if ".section" in text else text + "\n")
print(compiled.metadata.shared, compiled.metadata.num_warps, compiled.metadata.name)
