"""The text of one tile kernel: variables, blocks, addresses and masks."""

from __future__ import annotations

import re

import torch

from flowlib.core.formats import FORMAT
from flowlib.core.graph import Node
from flowlib.core.op import FLOAT8, Block, Inner, literal
from flowlib.core.spec import Spec

PROLOGUE = ("i_t", "i_r", "i_b", "i_h", "i_c", "i_p", "o_p", "m_p", "i_end", "n_pages", "seq_len", "in_full", "slot")
"""Variables that a kernel's first lines assign; a field may have any name."""
_STAGES = 2  # of loads that feed a dot product; with more, fewer programs fit on a multiprocessor
Address = tuple[str, list[str]]
"""A pointer parameter and the terms of an offset."""


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


class KernelWriter:
    """Collects the lines of one ``@triton.jit`` function; implements :class:`flowlib.core.op.Emitter`.

    Blocks are ``[pages or 1, r', c']``; inner axes are padded to powers of two and masked.

    Args:
        name: of the function.
        spec: the numbers written into it.
        tile: pages per program.
        imports: names the module must import, by module; added to.

    Attributes:
        has_page_axis: whether page numbers are a block, else one number: the written page.
        knows_length: whether a line has assigned ``seq_len``.
        columns: of axis 2 that a program works on, from column ``i_c`` on; 0 where that is all of them.
    """

    def __init__(self, name: str, spec: Spec, tile: int, imports: dict[str, set[str]]) -> None:
        self.name = name
        self.imports = imports
        self.spec = spec
        self.tile = tile
        self.hint = "value"
        self.loaded: dict[tuple[FORMAT, str], Block] = {}
        self._parameters: list[str] = []
        self._lines: list[str] = []
        self._names: set[str] = set(PROLOGUE)
        self.has_page_axis = True
        self.knows_length = False
        self.columns = 0
        self._offsets: set[int] = set()
        self._row_pages: dict[int, tuple[str, str]] = {}
        self._upcast: dict[str, str] = {}
        self._varying: set[str] = set()
        self._scale = ""
        self._loop: list[str] = []
        self._loop_head = ""
        self._dependent: set[str] = set()
        self._guard: tuple[int, str] | None = None
        self._comments: list[str] = []

    # -- what ops may ask (Emitter)

    def fp32(self, x: Block) -> str:
        if x.dtype is None or x.dtype is torch.float32:
            return x.name
        if x.name not in self._upcast:
            unit = f" * {x.unit}" if x.unit else ""
            self._upcast[x.name] = self._variable(f"{x.name}_f32", f"{x.name}.to(tl.float32){unit}")
        return self._upcast[x.name]

    def raw(self, x: Block) -> str | None:
        return x.name if x.dtype is not None and x.pad == 0.0 else None

    def filled(self, x: Block, value: float, axis: int) -> str:
        size = x.shape[axis - 1]
        text = self.fp32(x)
        if size == next_power_of_2(size) or x.pad == value:
            return text
        mask = f"({self.offset(size)} < {size}){_expand(axis)}"
        return f"tl.where({mask}, {text}, {literal(value)})"

    def let(self, expression: str, shape: Inner, *inputs: Block) -> Block:
        return Block(self._assign(self.hint, expression), shape, any(x.paged for x in inputs))

    def call(self, function: str, *arguments: str, results: int = 1) -> list[str]:
        module, name = function.split(":")
        self.imports.setdefault(module, set()).add(name)
        names = []
        for _ in range(results):
            names.append(self._free(f"b_{self.hint}_{name.strip('_')}"))
        self.line(f"{', '.join(names)} = {name}({', '.join(arguments)})")
        return names

    def same(self, expression: str, x: Block) -> Block:
        cast = f"({expression}).to({x.name}.dtype)"
        pad = 0.0 if x.pad == 0.0 else None
        return Block(self._assign(self.hint, cast), x.shape, x.paged, x.dtype, pad, unit=x.unit)

    def constant(self, value: float, shape: Inner) -> Block:
        sizes = [1, next_power_of_2(shape[0]), next_power_of_2(shape[1])]
        return Block(self._assign(self.hint, f"tl.full({sizes}, {literal(value)}, tl.float32)"), shape, False)

    def positions(self) -> Block:
        return Block(self._assign(self.hint, f"o_p{_expand(0)}.to(tl.float32)"), (1, 1), True)

    def row_length(self) -> str:
        if not self.knows_length:
            self.parameter("p_seq_lens")
            self.line("seq_len = tl.load(p_seq_lens + i_b).to(tl.int64)")
            self.knows_length = True
        return "seq_len"

    def of_heads(self, tensor: str) -> Block:
        size = self.spec.group_size
        self.parameter(f"p_{tensor}")
        place, mask = self.lanes(size, 1), self._mask((size, 1), False)
        guard = f", mask={mask}, other=0.0" if mask else ""
        text = f"tl.load(p_{tensor} + i_h * {size} + {place}{guard})"
        return Block(self._assign(tensor, text), (size, 1), False, torch.float32, 0.0)

    def lanes(self, size: int, axis: int) -> str:
        index = f"{self.offset(size)}{_expand(axis)}"
        return f"(i_c + {index})" if axis == 2 and size > 1 and self.columns else index

    def rearranged(self, x: Block, shape: Inner, row: str, column: str) -> Block:
        r, c = next_power_of_2(shape[0]), next_power_of_2(shape[1])
        width = next_power_of_2(x.shape[1])
        pages, flat = self.pages(x), self.offset(r * c)
        indices = {"i": f"({flat} // {c})", "j": f"({flat} % {c})"}
        last = f"{next_power_of_2(x.shape[0]) * width - 1}"
        source = f"tl.minimum(({row.format(**indices)}) * {width} + ({column.format(**indices)}), {last})"
        size = next_power_of_2(x.shape[0]) * width
        if pages == 1:  # Triton compiles a gather along the only axis, but not along the second of [1, n]
            gathered = f"tl.gather(tl.reshape({self.fp32(x)}, [{size}]), {source}, axis=0)"
        else:
            index = self._variable(f"i_{self.hint}", f"tl.broadcast_to(({source})[None, :], [{pages}, {r * c}])")
            gathered = f"tl.gather(tl.reshape({self.fp32(x)}, [{pages}, {size}]), {index}, axis=1)"
        return self.let(f"tl.reshape({gathered}, [{pages}, {r}, {c}])", shape, x)

    def padded(self, size: int) -> int:
        return next_power_of_2(size)

    def pages(self, x: Block) -> int:
        return self.tile if x.paged else 1

    # -- lines and parameters

    def parameter(self, *names: str, varying: bool = False) -> None:
        """Adds parameters that are not there yet; Triton compiles no kernel per value of a varying number."""
        self._parameters += [n for n in names if n not in self._parameters]
        if varying:
            self._varying |= set(names)

    def loop(self, variable: str, head: str) -> None:
        """Opens the loop over `variable` that the function ends with; lines that do not depend on it stay before it.

        `head` has a placeholder ``{stages}``, the loop's pipeline stages.
        """
        self._loop_head = head
        self._dependent.add(variable)

    def guard(self, condition: str) -> None:
        """What follows runs only where `condition` holds."""
        self._guard = len(self._lines), condition

    def line(self, text: str) -> None:
        """Adds a line."""
        if text.startswith("#"):
            self._comments.append(text)
            return
        target, assigned, _ = text.partition(" = ")
        inner = bool(self._loop_head) and (not assigned or not self._dependent.isdisjoint(re.findall(r"\w+", text)))
        if inner and assigned:
            self._dependent |= set(target.split(", "))
        lines = self._loop if inner else self._lines
        lines += [*self._comments, text]
        self._comments = []

    def offset(self, size: int) -> str:
        """The variable that holds ``arange`` over the padded axis of `size`."""
        padded = next_power_of_2(size)
        if padded not in self._offsets:
            self._offsets.add(padded)
            self.line(f"a_{padded} = tl.arange(0, {padded})")
        return f"a_{padded}"

    def text(self) -> str:
        """The function's source."""
        return function_text(self.name, self._parameters, self._varying, self.body())

    def body(self) -> list[str]:
        """The function's lines."""
        lines = list(self._lines)
        if self._loop_head:
            saves = any(line.startswith("tl.debug_barrier") for line in self._loop)
            stages = _STAGES if not saves and any("tl.dot(" in line for line in self._loop) else 1
            lines += [self._loop_head.format(stages=stages), *indented(self._loop)]
        if self._guard:
            count, condition = self._guard
            lines = [*lines[:count], f"if {condition}:", *indented(lines[count:])]
        return lines

    def joined(self, name: str, other: KernelWriter, other_head: list[str]) -> str:
        """The source of a function whose first programs run this body, and the others, from program ``n_rows`` on,
        `other_head` and then the body of `other` under it."""
        lines = other.body()
        assigned = {t for line in lines if " = " in line for t in line.strip().partition(" = ")[0].split(", ")}
        own = re.compile(rf"\b({'|'.join(sorted(assigned | set(PROLOGUE)))})\b")
        lines = [*other_head, *indented(lines)]
        lines = [own.sub(r"u_\1", line) for line in lines]  # Triton wants one type for a name that both sides assign
        body = ["begin(PDL)", "if tl.program_id(0) < n_rows:", *indented(self.body()), "else:", *indented(lines)]
        parameters = list(dict.fromkeys([*self._parameters, *other._parameters, "n_rows"]))
        return function_text(name, parameters, self._varying | other._varying | {"n_rows"}, body)

    # -- addresses: (pointer, offset of shape [pages or 1, r', c'])

    def rows(self, name: str, shape: Inner) -> Address:
        """Entry of the row in ``[bs, H * r, c]``."""
        self.parameter(f"p_{name}", f"s_{name}_b", f"s_{name}_h")
        head = "i_h" if shape[0] == 1 else f"(i_h * {shape[0]} + {self.offset(shape[0])}{_expand(1)})"
        first = ["i_c"] if self.columns and shape[1] > 1 else []
        return f"p_{name}", [f"i_b * s_{name}_b", f"{head} * s_{name}_h", *first, *self._inner(1, shape[1])]

    def field(self, name: str, shape: Inner) -> Address:
        """Entries of the pages in ``[num_pages, H, r, c]``."""
        self.parameter(f"f_{name}")
        self._find_pages()
        entry = f"(i_page * {self.spec.num_kv_heads} + i_h) * {shape[0] * shape[1]}"
        return f"f_{name}", [self._paged(entry), *self._inner(*shape)]

    def field_rows(self, name: str, shape: Inner) -> Address:
        """Rows of the pages in ``[num_pages, H, r, c]``, all on one axis of ``pages * r``; r is a power of two."""
        self.parameter(f"f_{name}")
        r, c = shape
        row = self.offset(self.tile * r)
        if r not in self._row_pages:
            place = self._variable("o_p", f"i_p + {row} // {r}")
            mask = self._variable("m_p", f"({place} >= {self.spec.bos}) & ({place} < i_end)")
            page = f"tl.load(p_page_table + i_b * s_page_table + {place}, mask={mask}, other=0).to(tl.int64)"
            self._row_pages[r] = self._variable("i_page_of_row", page), mask
        entry = f"({self._row_pages[r][0]} * {self.spec.num_kv_heads} + i_h) * {r} + {row} % {r}"
        return f"f_{name}", [f"(({entry}) * {c}){_expand(0)}", *self._inner(1, c)]

    def tokens(self, name: str) -> Address:
        """The pages' tokens in ``[T, H, D]``."""
        self.parameter(f"p_{name}", f"s_{name}_t", f"s_{name}_h")
        self._find_pages()
        size, dim = self.spec.page_size, self.spec.dv if name == "v" else self.spec.head_dim
        token = self._paged(f"i_page * {size}")
        if size > 1:
            token = f"({token} + {self.offset(size)}{_expand(1)})"
        return f"p_{name}", [f"{token} * s_{name}_t", f"i_h * s_{name}_h", *self._inner(1, dim)]

    def buffer(self, name: str, shape: Inner) -> Address:
        """Entries of the pages in ``[R, r, c, W]``, pages fastest."""
        self.parameter(f"w_{name}")
        self.parameter(f"s_{name}_r", f"s_{name}_lane", varying=True)
        lanes = self._inner(*shape)
        lane = [f"({' + '.join(lanes)}) * s_{name}_lane"] if lanes else []
        return f"w_{name}", [f"i_r * s_{name}_r", *lane, f"o_p{_expand(0)}"]

    def entries(self, name: str, shape: Inner) -> Address:
        """Entries of the pages in ``[R, W, r, c]``."""
        self.parameter(f"p_{name}")
        self.parameter(f"s_{name}_r", varying=True)
        size = shape[0] * shape[1]
        entry = self._paged(f"o_p * {size}" if size > 1 else "o_p")
        return f"p_{name}", [f"i_r * s_{name}_r", entry, *self._inner(*shape)]

    def _find_pages(self) -> None:
        if self.has_page_axis and "i_page" not in self._names:
            self._names.add("i_page")
            self.line("i_page = tl.load(p_page_table + i_b * s_page_table + o_p, mask=m_p, other=0).to(tl.int64)")

    def _paged(self, expression: str) -> str:
        if not self.has_page_axis:
            return f"({expression})"
        return f"{expression if expression.isidentifier() else f'({expression})'}{_expand(0)}"

    def _inner(self, r: int, c: int) -> list[str]:
        rows = [f"{self.offset(r)}{_expand(1)}" + (f" * {c}" if c > 1 else "")] if r > 1 else []
        columns = [f"{self.offset(c)}{_expand(2)}"] if c > 1 else []
        return rows + columns

    # -- loads and stores

    def load(self, leaf: Node, address: Address, joined: bool = False) -> Block:
        """Loads a leaf, by :meth:`field_rows` if `joined`, scaled float8 as float16 with a unit; masked lanes are 0."""
        name, shape, paged = leaf.name, leaf.shape, leaf.format is not FORMAT.BATCHED
        flat = joined or (paged and self.has_page_axis and shape[0] == 1 and shape[1] > 1)
        place, mask = self._place(name, address, shape, paged, flat)
        guard = f", mask={mask}, other={0 if leaf.scaled else 0.0}" if mask else ""
        known, text = leaf.dtype or torch.float32, f"tl.load({place}{guard})"
        unit = self.field_scale() if leaf.scaled else ""
        if leaf.scaled:
            codes = self._assign(f"{name}_codes", text)
            known, text = torch.float16, f"{self._float8('unscaled')}({codes})"
        loaded = self._assign(f"{name}_rows" if flat else name, text)
        if not flat:
            return Block(loaded, shape, paged, known, 0.0, unit=unit)
        whole = f"tl.reshape({loaded}, {self._padded_shape(shape, paged)})" if joined else f"{loaded}[:, None, :]"
        return Block(self._assign(name, whole), shape, paged, known, 0.0, loaded, unit)

    def store(self, name: str, address: Address, block: Block, shape: Inner, paged: bool, rounding: str = "") -> None:
        """Stores a block, broadcast to `shape`, in the dtype of its destination: with a `rounding`, scaled float8."""
        value = self.fp32(block)
        if block.shape != shape or block.paged != paged:
            value = f"tl.broadcast_to({value}, {self._padded_shape(shape, paged)})"
        place, mask = self._place(name, address, shape, paged)
        value = self._coded(value, mask, rounding) if rounding else f"{value}.to({address[0]}.dtype.element_ty)"
        self.line(f"tl.store({place}, {value}{f', mask={mask}' if mask else ''})")

    def field_scale(self) -> str:
        """The variable that holds the scale of the kv head's float8 summaries."""
        if not self._scale:
            self.parameter("p_field_scales")
            self._scale = self._variable("field_scale", "tl.load(p_field_scales + i_h)")
        return self._scale

    def _coded(self, value: str, mask: str, rounding: str) -> str:
        """Text of float8 codes; counts the bounds that are cut."""
        scale = self.field_scale()
        if rounding != "nearest":
            self.parameter("p_saturated")
            counted = f"tl.where({mask}, {value}, 0.0)" if mask else value
            self.line(f'{self._float8("count_saturated")}(p_saturated, {counted}, {scale}, "{rounding}")')
        return f'{self._float8("encode")}({value}, {scale}, "{rounding}")'

    def _float8(self, function: str) -> str:
        self.imports.setdefault(FLOAT8, set()).add(function)
        return function

    def _place(self, name: str, address: Address, shape: Inner, paged: bool, flat: bool = False) -> tuple[str, str]:
        """Writes the lines of an offset and a mask; returns the pointer expression and the mask's name, if any.

        `flat` leaves out axis 1, whose rows axis 0 has too: Triton finds better layouts for blocks of two axes.
        """
        pointer, terms = address
        if not any("[" in term for term in terms):
            terms = [*terms, f"{self.offset(1)}{_expand(2)}"]
        offset, mask = " + ".join(terms), self._mask(shape, paged)
        if flat:
            offset, mask = (t.replace("[:, None, None]", "[:, None]").replace("[None, None, :]", "[None, :]")
                            for t in (offset, mask))  # fmt: skip
            mask = mask.replace("m_p[", f"{self._row_pages[shape[0]][1]}[") if shape[0] > 1 else mask
        pages = (self.tile if paged else 1) * (shape[0] if flat else 1)
        self.line(f"# {name} {[pages, *shape[1 if flat else 0 :]]}")
        offset = self._variable(f"o_{name}", offset)
        return f"{pointer} + {offset}", self._variable(f"m_{name}", mask) if mask else ""

    def _padded_shape(self, shape: Inner, paged: bool) -> list[int]:
        return [self.tile if paged else 1, next_power_of_2(shape[0]), next_power_of_2(shape[1])]

    def _mask(self, shape: Inner, paged: bool) -> str:
        parts = [f"m_p{_expand(0)}"] if paged and self.has_page_axis else []
        for axis, size in enumerate(shape, start=1):
            if size != next_power_of_2(size):
                parts.append(f"({self.offset(size)} < {size}){_expand(axis)}")
        return " & ".join(parts)

    def _assign(self, hint: str, expression: str) -> str:
        return self._variable(f"b_{hint}", expression)

    def _variable(self, wanted: str, expression: str) -> str:
        variable = self._free(wanted)
        self.line(f"{variable} = {expression}")
        return variable

    def _free(self, wanted: str) -> str:
        variable, count = wanted, 1
        while variable in self._names:
            count += 1
            variable = f"{wanted}_{count}"
        self._names.add(variable)
        return variable


def indented(lines: list[str]) -> list[str]:
    """The lines, one level deeper."""
    return [f"    {line}" for line in lines]


def function_text(name: str, parameters: list[str], varying: set[str], body: list[str]) -> str:
    """The source of a kernel; Triton compiles none per value of a varying number."""
    numbers = ", ".join(f'"{p}"' for p in parameters if p in varying)
    decorator = f"@triton.jit(do_not_specialize=[{numbers}])" if numbers else "@triton.jit"
    pointers = [p for p in parameters if p.startswith(("p_", "f_", "w_"))]
    signature = [f"    {p}," for p in [*pointers, *(p for p in parameters if p not in pointers)]]
    head = [decorator, f"def {name}(", *signature, "    PDL: tl.constexpr,", "):"]
    return "\n".join([*head, *indented(body)]) + "\n"


def _expand(axis: int) -> str:
    return ("[:, None, None]", "[None, :, None]", "[None, None, :]")[axis]
