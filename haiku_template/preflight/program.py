"""Facts of a program compiled for GPUs, read from its optimized HLO."""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.table import Table

from haiku_template.reporting.display import in_units, table

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
OPERAND = re.compile(r"%([\w.\-]+)")
SHAPE = re.compile(r"(pred|[a-z]+\d+(?:e\dm\d\w*)?)\[([\d,]*)\]")
TARGET = re.compile(r'custom_call_target="([^"]+)"')
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
FORWARD, BACKWARD = "__cudnn$fmha", "Backward"
PRODUCTS = ("dot", "convolution")
GEMM = ("__cublas", "__cudnn$conv")
# They start no kernel.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}
FREE |= {"all-reduce-done", "copy-done", "partition-id", "replica-id"}
CALLS = re.compile(r"(?:calls|body|to_apply|(?:true|false)_computation)=%([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")  # Each may run.
TO_HOST = {"infeed", "outfeed", "send", "recv", "send-done", "recv-done"}


class Instruction(NamedTuple):
    """Line of a computation."""

    name: str
    shapes: tuple[tuple[str, int], ...]  # Dtype and number of elements of each result.
    op: str
    operands: tuple[str, ...]
    line: str

    @property
    def target(self) -> str:
        """Function of a custom call; "" for others."""
        target = TARGET.search(self.line)
        return target[1] if target else ""


class Program(NamedTuple):
    """Facts of a compiled step."""

    attention: tuple[int, int]  # Calls of cuDNN's, forward and backward.
    products: dict[str, int]  # And convolutions: numbers by `bf16 x bf16 to f32`.
    all_reduces: tuple[int, ...]  # Bytes of each.
    overlapped: int  # Of these with a product or attention between start and done.
    host_copies: int  # Transfers to or from the host.
    launches: int  # Kernels that a step starts, about.
    workspace: int  # Bytes of attention's backward pass beside XLA's plan.


def program_table(compiled: Any, size: int) -> Table:
    """Tabulates the facts of a compiled step; its state has `size` bytes."""
    program = read_program(compiled.as_text())
    forward, backward = program.attention
    calls = f"cuDNN: {forward} calls forward, {backward} backward"
    products = [f"{n} of {dtypes}" for dtypes, n in program.products.items()]
    reduces = f"{len(program.all_reduces)} of {sum(program.all_reduces):,} bytes; "
    reduces += f"{program.overlapped} run beside a product or attention"
    donated = compiled.memory_analysis().alias_size_in_bytes
    share = f"{in_units(donated)} of {in_units(size)} are donated"
    rows = {
        "attention": calls if forward else "no call of cuDNN's",
        "products": ", ".join(products) or "none",
        "all-reduces": reduces if program.all_reduces else "none",
        "host transfers": str(program.host_copies),
        "kernels": f"about {program.launches:,} for each step",
        "state": "donated whole" if donated >= size else share,
    }
    facts = table("Train step", ("what", "found"), rows.items())
    facts.columns[1].no_wrap = False
    return facts


def parse(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """Parses optimized HLO: the instructions of each computation, the entry's name."""
    computations: dict[str, list[Instruction]] = {}
    entry, name = "", ""
    for line in text.split("\n"):
        if header := COMPUTATION.match(line):
            name = header[2]
            computations[name] = []
            entry = name if header[1] else entry
        elif (fields := INSTRUCTION.match(line)) and name:
            result, shapes, op, arguments = fields.groups()
            sizes = tuple(
                (dtype, math.prod(map(int, filter(None, dimensions.split(",")))))
                for dtype, dimensions in SHAPE.findall(shapes)
            )
            operands = tuple(OPERAND.findall(arguments.split("), ")[0]))
            computations[name].append(Instruction(result, sizes, op, operands, line))
    return computations, entry


def read_program(text: str) -> Program:
    """Reads the facts of a program from its optimized HLO, in the order of its run."""
    computations, entry = parse(text)
    products: collections.Counter[str] = collections.Counter()
    attention = [0, 0]
    reduces: list[int] = []
    overlapped = host = launches = workspace = 0
    for times, body in _run(computations, entry, 1):
        dtypes = {i.name: i.shapes[0][0] if i.shapes else "" for i in body}
        sizes = {i.name: sum(_width(d) * n for d, n in i.shapes) for i in body}
        open_since: dict[str, bool] = {}
        for instruction in body:
            launches += times * (instruction.op not in FREE | {"while", "call"})
            host += times * (instruction.op in TO_HOST)
            inner = _inside(computations, instruction)
            gemms = [i for i in inner if i.op in PRODUCTS or i.target.startswith(GEMM)]
            fused = instruction.target.startswith(FORWARD)
            if fused:
                attention[BACKWARD in instruction.target] += times
            if BACKWARD in instruction.target:
                workspace = max(workspace, _workspace(instruction, body))
            for product in gemms:
                # A fusion's product has its operands in the fusion.
                fused_dtypes = {i.name: i.shapes[0][0] for i in inner if i.shapes}
                products[_dtypes(product, dtypes | fused_dtypes)] += times
            if gemms or fused:
                open_since = dict.fromkeys(open_since, True)
            if instruction.op in ("all-reduce-start", "all-reduce"):
                reduces += [sum(map(sizes.get, instruction.operands))] * times
            if instruction.op == "all-reduce-start":
                open_since[instruction.name] = False
            if instruction.op == "all-reduce-done":
                overlapped += times * open_since.pop(instruction.operands[0], False)
    return Program(
        attention=tuple(attention),
        products=dict(products.most_common()),
        all_reduces=tuple(reduces),
        overlapped=overlapped,
        host_copies=host,
        launches=launches,
        workspace=workspace,
    )


def _workspace(call: Instruction, body: list[Instruction]) -> int:
    """Workspace of cuDNN's backward pass, where its plan is not built.

    4 B H T C + 4 B H T + 256 bytes, fitted to one plan that was: of 8 x 12 x 1,024 x 64
    on an H100.
    """
    if call.shapes[-1][1]:
        return 0  # XLA's plan has it.
    sizes = {i.name: i.shapes[0] for i in body if i.shapes}
    operands = (sizes.get(name, ("", 0)) for name in call.operands)
    sums = next((size for dtype, size in operands if dtype == "f32"), 0)
    return 4 * call.shapes[0][1] + 4 * sums + 256


def _run(
    computations: dict[str, list[Instruction]], name: str, times: int
) -> Iterator[tuple[int, list[Instruction]]]:
    """Yields computations, bodies of loops among them, and how often each runs."""
    body = computations[name]
    yield times, body
    for instruction in body:
        if instruction.op in ("while", "call", "conditional"):
            trips = TRIPS.search(instruction.line)
            branches = " ".join(BRANCHES.findall(instruction.line))
            calls = CALLS.findall(instruction.line) + OPERAND.findall(branches)
            for inner in calls:
                often = times * int(trips[1] if trips else 1)
                yield from _run(computations, inner, often)


def _inside(
    computations: dict[str, list[Instruction]], instruction: Instruction
) -> list[Instruction]:
    if instruction.op != "fusion":
        return [instruction]
    name = CALLS.search(instruction.line)
    return computations.get(name[1], []) if name else []


def _dtypes(product: Instruction, dtypes: dict[str, str]) -> str:
    first, second = (dtypes.get(name, "?") for name in product.operands[:2])
    return f"{first} x {second} to {product.shapes[0][0]}"


def _width(dtype: str) -> int:
    bits = re.search(r"\d+", dtype)
    return max(int(bits[0]) // 8, 1) if bits else 1
