# SPDX-License-Identifier: Apache-2.0
"""What llvm-mca's models of cores say of the kernels' inner loops: ``make pipeline-model``. It needs LLVM 19 and, on
another architecture, a cross compiler for aarch64. The models know neither caches nor memory; a line for AVX-512, whose
cores have been met, says how far they are from what was measured there."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from build_ffi import BASE_FLAGS, FLAGGED, flagged_files, write_arguments  # noqa: E402

MCA = "llvm-mca-19"
ITERATIONS = 200
HEAD_SIZE = 128  # of the prefill that is summed up


@dataclass(frozen=True)
class Architecture:
    """Holds the tools for an architecture, and how its instructions look."""

    name: str
    prefix: str  # of the tools
    branch: str  # the mnemonics of branches, a regular expression
    products: dict[str, int]  # of each instruction that multiplies
    powers: tuple[str, int]  # what makes exponents in the softmax, a regular expression, and its lanes


ARM = Architecture(
    "aarch64",
    "aarch64-linux-gnu-",
    r"(?:b|cb|tb)\S*",
    {"fmla": 4, "fmlal": 4, "fmlal2": 4, "bfdot": 8, "bfmmla": 16},
    (r"shl .*, #23", 4),
)
X86 = Architecture("x86_64", "", r"j\w+", {"vfmadd231ps": 16}, ("vrndscaleps", 16))
# Independent instructions, whose products a cycle are the peak. {} is the number of a register.
PEAK = {
    "fmla": "fmla v{}.4s, v30.4s, v31.4s",
    "fmlal": "fmlal v{}.4s, v30.4h, v31.4h",
    "bfdot": "bfdot v{}.4s, v30.8h, v31.8h",
    "bfmmla": "bfmmla v{}.4s, v30.8h, v31.8h",
    "vfmadd231ps": "vfmadd231ps %zmm30, %zmm31, %zmm{}",
}
# isa, dtype, architecture and the cores whose models are asked.
KERNELS = (
    ("neon", "f32", ARM, ("neoverse-n1", "neoverse-v1", "neoverse-v2")),
    ("neon", "f16", ARM, ("neoverse-n1", "neoverse-v1", "neoverse-v2")),
    ("neon_fhm", "f16", ARM, ("neoverse-n2", "neoverse-v1", "neoverse-v2")),
    ("neon", "bf16", ARM, ("neoverse-n1",)),
    ("neon_bf16", "bf16", ARM, ("neoverse-n2", "neoverse-v1", "neoverse-v2")),
    ("avx512", "f32", X86, ("sapphirerapids", "znver4")),
)
# The functions that a loop may be in, since the compiler inlines some and makes one of equal ones.
MULTIPLY = {"qk": "qk|qk_block", "pv": "pv|pv_block"}
SOFTMAX = "online_softmax|softmax_block|tile"


@dataclass(frozen=True)
class Loop:
    """Holds the instructions of a loop without loops inside."""

    of: Architecture
    body: tuple[str, ...]

    def count(self, instruction: str) -> int:
        return sum(line.split()[0] == instruction for line in self.body)

    @property
    def products(self) -> int:
        return sum(number * self.count(name) for name, number in self.of.products.items())

    @property
    def scores(self) -> int:
        """Gives how many scores become weights in an iteration, if that is what it does."""
        name, lanes = self.of.powers
        return lanes * sum(bool(re.match(name, line)) for line in self.body)

    def cycles(self, core: str) -> float:
        """Gives the cycles of one iteration."""
        command = [MCA, f"-mtriple={self.of.name}-linux-gnu", f"-mcpu={core}", f"-iterations={ITERATIONS}"]
        text = "\n".join(self.body)
        said = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
        total = re.search(r"Total Cycles:\s+(\d+)", said)
        assert total, said
        return int(total[1]) / ITERATIONS


def compiled(isa: str, of: Architecture, folder: Path) -> Path:
    file = next(file for file in flagged_files(FLAGGED[0]) if file.name == isa)
    target = folder / f"{isa}.o"
    flags = [*BASE_FLAGS, f"-I{ROOT / 'native'}", f"-I{folder}", *file.flags, *file.tuned]
    subprocess.run([f"{of.prefix}gcc", *flags, "-c", str(file.path), "-o", str(target)], check=True)
    return target


def loops_of(objects: Path, of: Architecture, symbols: str) -> list[Loop]:
    """Finds the innermost loops of functions: what a branch back encloses, if it holds no other branch back."""
    command = [f"{of.prefix}objdump", "-d", "--no-show-raw-insn", objects]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    functions = re.findall(rf"^[0-9a-f]+ <(?:{symbols})(?:\.\w+)*>:\n(.*?)(?=\n\n|\Z)", said, re.M | re.S)
    return [Loop(of, body) for function in functions for body in innermost(function, of)]


def innermost(function: str, of: Architecture) -> Iterator[tuple[str, ...]]:
    code: dict[int, str] = {}
    for line in function.splitlines():
        address, _, rest = line.partition(":\t")
        code[int(address, 16)] = re.sub(r"\s*(?://|# ).*", "", rest).strip().replace("\t", " ")
    jump = re.compile(rf"{of.branch} .*?\b([0-9a-f]+) <")
    targets = {a: int(to[1], 16) for a, x in code.items() if (to := jump.match(x))}
    back = {a: to for a, to in targets.items() if to in code and to <= a}
    for address, to in back.items():
        if not any(to <= other < address for other in back):
            yield tuple(re.sub(r"\b[0-9a-f]+ <.*", ".", x) for a, x in code.items() if to <= a <= address)


def peak(of: Architecture, core: str, loop: Loop) -> float:
    """Gives the most products a cycle of the instruction that makes most of the loop's, by the same model."""
    name = max(of.products, key=lambda name: of.products[name] * loop.count(name))
    alone = Loop(of, tuple(PEAK[name].format(i) for i in range(28)))
    return alone.products / alone.cycles(core)


def full(loop: Loop) -> tuple[int, int]:
    """Sorts loops: that of a full tile has most products, and fewest instructions of those that have as many."""
    return loop.products, -len(loop.body)


def main() -> None:
    table = Table(title=f"Products a cycle, and of the peak, by models; a prefill of head size {HEAD_SIZE}")
    for name in ("isa", "dtype", "core", "qk", "pv", "softmax: cycles a score", "prefill"):
        table.add_column(name)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_arguments(folder)
        for isa, dtype, of, cores in KERNELS:
            objects = compiled(isa, of, folder)
            loops = {what: loops_of(objects, of, f"(?:{names})_{dtype}") for what, names in MULTIPLY.items()}
            found = {what: max(loops[what], key=full) for what in loops}
            # The softmax of float32 weights is one for all dtypes.
            softmax = max(loops_of(objects, of, rf"(?:{SOFTMAX})_b?f\d\d"), key=lambda loop: loop.scores)
            for core in cores:
                most = peak(of, core, found["qk"])
                qk, pv = (found[name].products / found[name].cycles(core) for name in ("qk", "pv"))
                score = softmax.cycles(core) / softmax.scores
                all_of = 2 * HEAD_SIZE / (HEAD_SIZE / qk + HEAD_SIZE / pv + score)
                cells = (f"{rate:.1f}, {rate / most:.2f}" for rate in (qk, pv))
                table.add_row(isa, dtype, core, *cells, f"{score:.2f}", f"{all_of:.1f}, {all_of / most:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
