"""Translate inline PTX for the CPU emulator: each instruction becomes a call of its twin.

The compiler preprocesses a file that contains `asm`, translate() replaces the statements in the
result, and the compiler goes on with that; the file itself is not changed. csrc/emulator/ptx.txt
says which instructions are taken, and what each becomes. Any other is a BuildError with its file
and line.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import CSRC, STRING, TOKEN, split

# A pattern that begins with a letter, and only then looks behind, is found ten times faster in a
# million characters of headers than one that begins with \b.
ASM = re.compile(r"(?:asm(?<!\wasm)|__asm(?<!\w__asm)(?:__)?)\b\s*(?:(?:__)?volatile\w*\s*)*\(")
# What needs a translation, or only inline_ptx.h, besides asm.
FOREIGN = re.compile(
    rb"\bextern\s+(?:(?:__align__|alignas)\s*\([^;{]+?\)\s*)?__shared__\b|__shared__\s+alignas\b"
    rb"|\bstatic\s+__shared__\b|\b__noinline__\b|<<<"
    rb"|\b__(?:reduce_\w+_sync|match_any_sync|byte_perm|funnelshift_[lr]|brev|cvta_\w+)\b"
)
ALIGNED = re.compile(r"static(?<!\wstatic) thread_local\s+(alignas\s*\((?:[^()]|\([^()]*\))*\))")
# `static __shared__` is valid, too. Arrays are aligned, as kernels of other people rely on.
STATIC = re.compile(r"static(?<!\wstatic)(?:\s+static)? thread_local\b(?=([^;(){}=]*\[)?)")
_NUMBER = r"((?:[^()]|\([^()]*\))+)"
_ALIGN = rf"(?:(?:__attribute__\s*\(\(aligned\s*\({_NUMBER}\)\)\)|alignas\s*\({_NUMBER}\))\s*)?"
DYNAMIC = re.compile(
    rf"e(?<!\we)xtern\s+{_ALIGN}static thread_local\s+{_ALIGN}([\w:<>, ]+?)\s*\b(\w+)\s*\[\s*]\s*;"
)
LAUNCH = re.compile(r"<<<((?:(?!<<<).)*?)>>>(?=\s*\()", re.S)
# The name of the kernel before it, and the arguments of a template.
KERNEL = re.compile(
    r"(?<![\w:])((?:\w+::)*([A-Za-z_]\w*)(\s*<[^;{}()<>]*(?:<[^;{}()<>]*>[^;{}()<>]*)*>)?)\s*$"
)
# No macro: the headers of the system have it inside __attribute__.
NOINLINE = re.compile(r"__noinline__\b(?<![\w(]__noinline__)")
# Ours names the line and the thread.
PRINTF = re.compile(r"printf(?<![\w:.>]printf)(?=\s*\()")
_VOID = r"(?:const\s+)?void\s*(?:const\s*)?\*\s*"
# The cast hides the kernel's type.
UNTYPED = re.compile(
    r"(cudaLaunch(?<!\wcudaLaunch)(?:Cooperative)?Kernel\s*\(\s*)"
    rf"(?:\(\s*{_VOID}\)|(?:reinterpret|static)_cast\s*<\s*{_VOID}>)"
)
# Between the pragmas of an entry's source, what has a name of ours gets another one.
THEIRS = re.compile(r"^#pragma attention\n(.*?)^#pragma attention end\n", re.M | re.S)
# gridDim or blockDim, macros, also as a member of cudaLaunchConfig_t and as a host variable's name.
DIMENSION = re.compile(r"\(::attention::emulator::this_fiber\(\)\.block->launch->(grid|block)\)")
MEMBER = re.compile(rf"(\.|->)\s*{DIMENSION.pattern}")
DECLARED = re.compile(rf"(?<=\w)(?<!\breturn)(?<!\belse)(?<!\bcase)\s+{DIMENSION.pattern}")
MARKER = re.compile(r'^# (\d+) "([^"\n]*)"((?: \d)*)\n', re.M)
NAMESAKE = re.compile(
    rf"^# .*|{STRING.pattern}|\battention\b(?!::(?:emulator|ptx)\b)|\bmain\b(?=\s*\()", re.M
)
STATEMENT = re.compile(r"\s*(?:([{}])|([\w$%]+)\s*:(?!:)|([^;]+);|(\S))")
GUARDED = re.compile(r"(?:@(!?)([\w$%]+)\s+)?(\S+)\s*(.*)", re.S)
OPERAND = re.compile(r"([\[{]?)(\w)[]}]?\|?(\w?)(\??)(?::([^=\s]+))?(?:=(\S+))?")
FILE = CSRC / "emulator" / "ptx.txt"
NAMESPACE = "::attention::ptx::text::"
TYPES = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{"f16": "$Half", "bf16": "$Bfloat16", "f16x2": "$Pair<$Half>", "bf16x2": "$Pair<$Bfloat16>"},
    **{"f32": "float", "f64": "double", "pred": "bool", "tf32": "$Tf32"},
}


@dataclass(frozen=True)
class Row:
    """An instruction that is taken."""

    name: str
    operands: str = ""
    code: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What an instruction's name must match."""
        syntax = {".": r"\.", "(": "(?:", "[": "(?:", "]": ")?"}
        text = re.sub(r"[.(\[\]]", lambda found: syntax[found[0]], self.name)
        return re.compile(re.sub(r"<(\w+)>", lambda m: f"(?P<{m[1]}>{CLASSES[m[1]]})", text))

    @functools.cached_property
    def wanted(self) -> list[tuple[str, ...]]:
        """Of each operand its bracket, its letter, that of a second one, "?", type and default."""
        return [tuple(one) for one in OPERAND.findall(self.operands)]


def _section(title: str) -> list[list[str]]:
    text = re.sub(r"\n {4}(?= *\S)", "  ", FILE.read_text("utf-8"))
    lines = text.split(f"= {title}\n")[1].split("\n= ")[0].splitlines()
    return [line.split("  ", 2) for line in lines if line]


CLASSES = dict(_section("classes"))
# "?" stands for each of x, y and z.
SPECIAL = {
    name.replace("?", axis): code.replace("?", axis)
    for name, code in _section("special registers")
    for axis in ("xyz" if "?" in name else "?")
}
ROWS = [Row(*map(str.strip, row)) for row in _section("instructions")]


def table() -> str:
    """Return a table of what is taken, in Markdown."""
    families: dict[str, dict[str, None]] = {}
    for row in ROWS:
        families.setdefault(re.findall(r"\w+", row.name)[0], {})[row.name] = None
    families |= {f"<{name}>": {text.replace("?:", ""): None} for name, text in CLASSES.items()}
    families["%"] = dict.fromkeys(SPECIAL)
    lines = ["| instruction, class or register | forms |", "|---|---|"]
    for family, names in families.items():
        forms = ", ".join(f"`{name}`" for name in names).replace("|", r"\|")
        lines.append(f"| `{family}` | {forms} |")
    return "\n".join(lines)


class _RefusedError(Exception):
    """An instruction, or a part of it, that the emulator does not take."""


def is_foreign(source: bytes) -> bool:
    """Return whether a source may contain what translate() replaces."""
    return bool(FOREIGN.search(source) or ASM.search(source.decode("latin-1")))


def translate(text: str, own: Path) -> str:
    """Return preprocessed source in which calls have replaced the inline PTX.

    A pointer replaces `extern __shared__ T name[]` in a function, and a call replaces
    `kernel<<<...>>>(...)`: see host.h. The headers in the folder `own` and the system's may contain
    the CPU's assembly, which is kept. Raises BuildError for what is not in ptx.txt, with file and
    line.
    """
    for found in re.finditer(r"__cluster_dims__\b", text):
        if marker := _marker(text, found.start(), own):
            raise BuildError(
                f"{Path(marker[2]).name}:{_line(marker, found)}: error: the CPU emulator does not "
                "take __cluster_dims__; it takes the size of clusters from cudaLaunchKernelEx()"
            )
    text = THEIRS.sub(lambda theirs: NAMESAKE.sub(_renamed, theirs[1]), text)
    parts, end = [], 0
    for number, found in enumerate(ASM.finditer(text)):
        marker = _marker(text, found.start(), own)
        if not marker:
            continue
        file, line = marker[2], _line(marker, found)
        sections, close = split(text, ":", found.end())
        try:
            code = _Asm(sections, number, f'"{file}", {line}').code
        except _RefusedError as error:
            raise BuildError(f"{Path(file).name}:{line}: error: {error}") from None
        for inner in MARKER.finditer(text, found.start(), close):
            line = int(inner[1]) - text.count("\n", found.start(), inner.end())
        line += text.count("\n", found.start(), close)
        parts += [text[end : found.start()], code, f'\n# {line} "{file}"\n']
        end = close + 1
    text = DYNAMIC.sub(_pointer, "".join([*parts, text[end:]]))
    text = STATIC.sub(_static, ALIGNED.sub(r"\1 static thread_local", text))
    text = NOINLINE.sub("__attribute__((noinline))", text)
    text = UNTYPED.sub(r"\1", text)
    text = _with_variables(MEMBER.sub(r"\1\2_", text))
    parts, end = [], 0
    for found in LAUNCH.finditer(text):
        if not _is_code(text, found.start(), own):
            continue
        begin = found.start()
        kernel = KERNEL.search(text, max(end, begin - 500), begin)
        if kernel and _is_deduced(text, kernel[2], kernel[3] or ""):
            parts += [text[end : kernel.start()], f"[](auto... x) {{ {kernel[1]}(x...); }}"]
        else:
            parts.append(text[end:begin])
        parts.append(f" ->* ::attention::emulator::LaunchSettings({found[1]})")
        end = found.end()
    text = "".join([*parts, text[end:]])
    return PRINTF.sub(lambda m: "::attention::" * _is_code(text, m.start(), own) + m[0], text)


def _is_deduced(text: str, name: str, given: str) -> bool:
    """Return whether a launch of a template leaves some of its arguments to be deduced."""
    attributes = r"(?:static\s+|inline\s+|__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)*"
    pattern = rf"template\s*<([^;{{}}()]*)>\s*{attributes}void\s+{attributes}{name}\s*\("
    commas = re.sub(r"<[^<>]*>", "", given.strip()[1:-1])
    count = commas.count(",") + 1 if given else 0
    return any(
        len([one for one in found[1].split(",") if "=" not in one and "..." not in one]) > count
        for found in re.finditer(pattern, text)
    )


def _with_variables(text: str) -> str:
    """Rename gridDim and blockDim wherever host code has a variable or parameter of such a name."""
    at = len(text[: first.start()].rstrip()) - 1 if (first := DIMENSION.search(text)) else len(text)
    while found := DECLARED.search(text, at):
        depth, is_parameter, at, end = 0, False, found.start(), len(text)
        for token in TOKEN.finditer(text, found.end()):
            depth += (token[0] in ("(", "[", "{")) - (token[0] in (")", "]", "}"))
            if depth < 0 and token[0] == ")":
                depth, is_parameter = 0, True
            elif depth < 0 or (is_parameter and depth == 0 and token[0] in (";", "}")):
                end = token.start()
                break
        text = text[:at] + DIMENSION.sub(r"\1_", text[at:end]) + text[end:]
    return text


def _is_code(text: str, at: int, own: Path) -> bool:
    """Return whether a place is in a kernel's file, but in no string."""
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line.replace(r"\"", "").count('"') % 2 == 0 and bool(_marker(text, at, own))


def _marker(text: str, at: int, own: Path) -> re.Match[str] | None:
    """Return what names file and line of a place; None in our headers and the system's."""
    marker = MARKER.match(text, text.rfind("\n# ", 0, at) + 1)
    if not marker or "3" in marker[3] or own in Path(os.path.normpath(marker[2])).parents:
        return None
    return marker


def _line(marker: re.Match[str], found: re.Match[str]) -> int:
    """Return the line in which a match begins, given the marker before it."""
    return int(marker[1]) + found.string.count("\n", marker.end(), found.start())


def _renamed(found: re.Match[str]) -> str:
    return found[0] + "_" * (found[0] in ("attention", "main"))


def _static(found: re.Match[str]) -> str:
    return f"static thread_local{' __attribute__((aligned(32)))' * bool(found[1])}"


def _pointer(found: re.Match[str]) -> str:
    """Replace an array `extern __shared__` in a function by a pointer."""
    *alignments, kind, name = found.groups()
    alignment = next(filter(None, alignments), "128")
    memory = f"::attention::emulator::this_fiber().block->shared.align({alignment})"
    outside = f'{NAMESPACE}same(__func__, "top level")'
    reason = "the CPU emulator takes extern __shared__ in functions only"
    check = f'static_assert(!{outside}, "{reason}");'
    return f"{check} {kind}* const {name} = reinterpret_cast<{kind}*>({memory});"


class _Asm:
    """An asm statement; `code` is its translation, one line."""

    def __init__(self, sections: Sequence[str], number: int, place: str) -> None:
        self.number, self.place, self.declared, self.count = number, place, set[str](), 0
        sections = [MARKER.sub("", section) for section in sections]
        if unquoted := STRING.sub("", sections[0]).strip():
            raise _RefusedError(f"the text of an asm must be string literals, not {unquoted}")
        text = "".join(
            found[2] if found[3] is None else ast.literal_eval(found[3])
            for found in STRING.finditer(sections[0])
        )
        code, texts = [], []
        for piece in [*_operands(sections[1:2]), *_operands(sections[2:3])]:
            found = re.fullmatch(r'\s*"([=+]?)[&%]?(\w)"\s*\((.*)\)\s*', piece, re.S)
            if not found or found[2] not in "rlhfdnC0123456789" or (found[1] and found[2] in "nC"):
                raise _RefusedError(f"the CPU emulator does not take the operand {piece.strip()}")
            name, kind, expression = f"ptx_{self.count}", found[2], " ".join(found[3].split())
            self.count += 1
            if found[1]:
                code.append(f"auto& {name} = $output<'{kind}'>({expression});")
            elif kind.isdigit():
                code.append(f"auto& {name} = ptx_{kind} = ({expression});")
            elif kind in "nC":
                code.append(f"constexpr auto {name} = $constant({expression});")
                texts += [name] * (kind == "C")
            else:
                code.append(f"const auto {name} = $input<'{kind}'>({expression});")
        body = self._choices(text, texts) if texts else self._body(text)
        self.code = f"do {{ {' '.join(code)} {body} }} while (0)".replace("$", NAMESPACE)

    def _choices(self, text: str, names: Sequence[str]) -> str:
        """Translate a text in which operands of constraint C, templates' constants, are types."""
        choices, refused = {}, _RefusedError("")
        for kinds in itertools.product(("f16", "bf16"), repeat=len(names)):
            condition = " && ".join(
                f'$same({name}, "{kind}")' for name, kind in zip(names, kinds, strict=True)
            )
            filled = text
            for name, kind in zip(names, kinds, strict=True):
                filled = re.sub(rf"%{name[4:]}\b", kind, filled)
            try:
                choices[condition] = self._body(filled)
            except _RefusedError as error:
                refused = error
        if not choices:
            raise refused
        branches = [f"if constexpr ({one}) {{ {body} }}" for one, body in choices.items()]
        return f"static_assert({' || '.join(choices)}); {' else '.join(branches)}"

    def _body(self, text: str) -> str:
        """Translate the text of instructions."""
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
        text = text.replace("%%", "%").replace("%=", "")
        code = []
        for brace, label, statement, rest in STATEMENT.findall(text):
            if rest:
                raise _RefusedError(f"`;` is missing after {rest}")
            if brace:
                code.append(brace)
            elif label:
                code.append(f"{self._label(label)}:;")
            else:
                code.append(self._guarded(" ".join(statement.split())))
        return " ".join(code)

    def _label(self, name: str) -> str:
        return "ptx_" + re.sub(r"\W", "_", f"{name}_{self.number}")

    def _guarded(self, statement: str) -> str:
        if found := re.fullmatch(r"\.reg ?\.(\w+) (.+)", statement):
            return self._registers(*found.groups())
        negated, guard, opcode, rest = GUARDED.findall(statement)[0]
        if opcode in ("bra", "bra.uni"):
            code = f"goto {self._label(rest)};"
        else:
            code = f"{{ {self._instruction(statement, opcode, rest)} }}"
        return f"if ({negated}$get<bool>({self._value(guard)})) {code}" if guard else code

    def _registers(self, kind: str, names: str) -> str:
        kinds = {"pred": "bool", "f32": "float", "f64": "double", "f16x2": "uint32_t"}
        kinds |= {f"{sign}{n}": f"uint{n}_t" for sign in "bsuf" for n in (8, 16, 32, 64)} | kinds
        if kind not in kinds:
            raise _RefusedError(f"the CPU emulator has no register of type .{kind}")
        declared = []
        for name in map(str.strip, names.split(",")):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            declared += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        self.declared.update(declared)
        return f"{kinds[kind]} {', '.join(map(self._value, declared))};"

    def _value(self, token: str) -> str:
        """Return the C++ for a register or a number."""
        token = token.strip()
        if token in self.declared:
            return "ptx_r" + re.sub(r"\W", "_", token)
        if re.fullmatch(r"%\d+", token) and int(token[1:]) < self.count:
            return f"ptx_{token[1:]}"
        if token[:1] == "%" and token[1:] in SPECIAL:
            return f"({SPECIAL[token[1:]]})"
        if found := re.fullmatch(r"0([fFdD])([0-9a-fA-F]{8,16})", token):
            return f"$bits<{'float' if found[1] in 'fF' else 'double'}>(0x{found[2]})"
        if found := re.fullmatch(r"([-+]?(?:\d+|0[xX][0-9a-fA-F]+))[uU]?", token):
            return f"{found[1]}ll"
        if re.fullmatch(r"_|[-+]?\d+\.\d*(e[-+]?\d+)?", token):
            return token.replace("_", "$sink")
        raise _RefusedError(f"the CPU emulator has no register {token}")

    def _instruction(self, statement: str, opcode: str, rest: str) -> str:
        given: list[tuple[str, list[str]]] = []
        for piece in _operands([rest]):
            inner = _operands([piece.strip()[1:-1]])
            if piece.lstrip()[0] == "[":
                given.append(("[", inner[:1]))
                inner = _operands([inner[1].strip()[1:-1]]) if len(inner) > 1 else []
            if piece.lstrip()[0] == "{" or (piece.lstrip()[0] == "[" and inner):
                given.append(("{", inner))
            elif piece.lstrip()[0] != "[":
                given.append(("", [one.strip() for one in piece.split("|")]))
        known = False
        for row in ROWS:
            if found := row.pattern.fullmatch(opcode):
                known = True
                if (code := self._matched(row, found, given)) is not None:
                    return code
        raise _RefusedError(
            f"the CPU emulator does not take `{statement}`" + known * " with these operands"
        )

    def _matched(
        self, row: Row, found: re.Match[str], given: Sequence[tuple[str, list[str]]]
    ) -> str | None:
        """Return the C++ for an instruction if its operands are those of a row."""
        groups = found.groupdict()
        kind = TYPES.get(found[0].rsplit(".", 1)[-1], "void")
        names = {"T": kind, "U": f"std::make_unsigned_t<{kind}>", "W": f"$Wide<{kind}>", "N": "1"}
        names |= {"D": TYPES.get(groups.get("D") or groups.get("half") or "", "")}
        names |= {"S": TYPES.get(groups.get("S") or "", "")}
        if len(given) > len(row.wanted) or not all(one[3] for one in row.wanted[len(given) :]):
            return None
        for (shape, *_), (form, tokens) in zip(row.wanted, given, strict=False):
            if form != shape and (form, shape) != ("", "{"):
                return None
            if shape == "{" and names["N"] == "1":
                names["N"] = str(len(tokens))

        def filled(text: str) -> str:
            text = re.sub(r"\{(\w{3,})\}", lambda m: groups[m[1]] or "", text)
            text = re.sub(r"\b[A-Za-z]\b", lambda m: names.get(m[0], m[0]), text)
            site = f'::attention::emulator::Site{{"{found[0].split(".")[0]}", {self.place}}}'
            return text.replace("$SITE", site)

        written: list[str] = []
        padded = [*given, *[("", list[str]())] * len(row.wanted)]
        for (shape, name, second, _, of, default), (_, tokens) in zip(
            row.wanted, padded, strict=False
        ):
            kind = TYPES.get(of) or filled(of or "T")
            if shape == "" and len(tokens) > 1 and not second:
                return None
            if not tokens:
                names[name] = default or "0"
            elif shape == "[":
                names[name] = self._address(tokens[0])
            elif kind == "&":
                names[name] = f"{{{', '.join(f'&{self._value(token)}' for token in tokens)}}}"
            elif name == "d":
                count = len(tokens) if shape else 1
                written = [f"$set<{kind}>({self._value(token)}, " for token in tokens[:count]]
                names |= {second: self._value([*tokens, "_"][1])} if second else {}
            else:
                read = ", ".join(self._read(kind, token) for token in tokens)
                names[name] = f"{{{read}}}" if shape else read
        code = filled(row.code)
        if written and row.operands[0] == "{":
            return " ".join([code, *(f"{one}r[{i}]);" for i, one in enumerate(written))])
        return f"{written[0]}{code});" if written else f"{code};"

    def _read(self, kind: str, token: str) -> str:
        negated = token.startswith("!")
        return f"{'!' * negated}$get<{kind}>({self._value(token[negated:])})"

    def _address(self, token: str) -> str:
        first, *more = re.split(r"([+-])", token)
        more = [one if one.strip() in ("+", "-", "") else self._value(one) for one in more]
        return f"($address({self._value(first)}){' '.join(['', *more])})"


def _operands(sections: Sequence[str]) -> list[str]:
    return [one for text in sections for one in split(text, ",")[0] if one.strip()]
