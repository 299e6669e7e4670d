"""Translate inline PTX for the CPU emulator: each instruction of an `asm` becomes a call of its twin.

The compiler preprocesses a file that contains `asm`, translate() replaces the statements in the
result, and the compiler goes on with that; the file itself is not changed. TABLE says which
instructions are taken. Any other is a BuildError with file, line and instruction.

A row of TABLE has an instruction, its operands, and C++. In the instruction [x] may be missing,
(a|b) is a choice and <name> one of CLASSES. Operand d is written, the others are read; [a] is an
address, {a} a vector or a single register, and one with "?" may be missing. They have the
instruction's last type T or the one after the colon; "&" is the register itself. The C++ is an
expression for d or, if that is a vector, statements that define an array r. In it a letter stands
for an operand, {name} for the text of a class, N for the length of the first vector, U for T
without a sign, W for a type twice as wide, and $ for the namespace of csrc/emulator/inline_ptx.h.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_kernels.ladder.compilers import BuildError

ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:(?:volatile|__volatile__)\b\s*)*\(")
# What g++ does not take of CUDA, before and after the preprocessor: arrays of shared memory.
FOREIGN = re.compile(
    rb"\bextern\s+(?:(?:__align__|alignas)\s*\(\w+\)\s*)?__shared__\b|__shared__\s+alignas\b"
)
ALIGNED = re.compile(r"\bstatic thread_local\s+(alignas\s*\((?:[^()]|\([^()]*\))*\))")
_ALIGNED = r"(?:(?:__attribute__\s*\(\(aligned\s*\((\w+)\)\)\)|alignas\s*\((\w+)\))\s*)?"
DYNAMIC = re.compile(
    rf"\bextern\s+{_ALIGNED}static thread_local\s+{_ALIGNED}([\w:<>, ]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)
MARKER = re.compile(r'^# (\d+) "([^"\n]*)"((?: \d)*)\n', re.M)
STRING = re.compile(r'R"(\w*)\((?s:(.*?))\)\1"|("(?:\\.|[^"\\])*")')
TOKEN = re.compile(STRING.pattern + r"|'(?:\\.|[^'\\])*'|[][(){}:,]")
STATEMENT = re.compile(r"\s*(?:([{}])|([\w$%]+)\s*:(?!:)|([^;]+);|(\S))")
GUARDED = re.compile(r"(?:@(!?)([\w$%]+)\s+)?(\S+)\s*(.*)", re.S)
OPERAND = re.compile(r"([\[{]?)(\w)[]}]?(\|\w)?(\?)?(?::([^=]+))?(?:=(.+))?")
NAMESPACE = "::attention::ptx::text::"
TYPES = {
    **{f"{kind}{bits}": f"uint{bits}_t" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{"f16": "$Half", "bf16": "$Bfloat16", "f16x2": "$Pair<$Half>", "bf16x2": "$Pair<$Bfloat16>"},
    **{"f32": "float", "f64": "double", "pred": "bool", "tf32": "$Tf32"},
}
CLASSES = {
    "int": "[su](?:16|32|64)",
    "float": "f32|f64|b?f16(?:x2)?",
    "number": "[bsu](?:16|32|64)|f32|f64|b?f16(?:x2)?",
    "bits": "b(?:16|32|64)",
    "any": "[bsu](?:8|16|32|64)|f32|f64|b?f16",
    "atomic": "[bsu](?:32|64)|f32|f64|b?f16(?:x2)?",
    "D": "[su](?:8|16|32|64)|f32|f64|b?f16|tf32",
    "S": "[su](?:8|16|32|64)|f32|f64|b?f16",
    "half": "f16|bf16",
    "round": "rn|rz|rna|rni|rzi|rmi|rpi",
    "relu": r"(?:\.relu)?",
    "sat": r"(?:\.sat|\.satfinite)?",
    "compare": "(?:eq|ne|lt|le|gt|ge)u?|lo|ls|hi|hs|num|nan",
    "logic": "and|or|xor",
    "function": "ex2|lg2|rcp|rsqrt|sqrt|sin|cos|tanh|neg|abs",
    "side": "l|r",
    "beyond": "wrap|clamp",
    "space": r"(?:\.(?:global|const|local|param|shared(?:::cta|::cluster)?))?",
    "shared": r"(?:\.shared(?:::cta|::cluster)?)?",
    "order": r"(?:\.(?:relaxed|acquire|release|acq_rel))?",
    "scope": r"(?:\.(?:cta|cluster|gpu|sys))?",
    "hints": r"(?:\.(?:ca|cg|cs|lu|cv|wb|wt|nc|L[12]::\w+))*",
    "vector": r"(?:\.v[24])?",
    "update": "add|min|max|exch|and|or|xor|inc|dec",
    "lanes": "up|down|bfly|idx",
    "trans": r"(?:\.trans)?",
    "count": "1|2|4",
    "columns": r"\d+",
    "dimensions": "[1-4]",
}
TABLE = r"""
mov.(<any>|pred)  d a  a
mov.<any>  d {a}:$Part<T,N>  $bits<T>($Pack<$Part<T,N>, N> a)
mov.<any>  {d}:$Part<T,N> a  const auto r = $bits<$Pack<$Part<T,N>, N>>(a);
add.<int>  d:U a:U b:U  a + b
sub.<int>  d:U a:U b:U  a - b
mul.lo.<int>  d a b  T(W(a) * W(b))
mul.hi.<int>  d a b  T(W(a) * W(b) >> 8 * sizeof(T))
mul.wide.<int>  d:W a b  W(a) * W(b)
mad.lo.<int>  d a b c  T(W(a) * W(b) + W(c))
mad.hi.<int>  d a b c  T((W(a) * W(b) >> 8 * sizeof(T)) + W(c))
mad.wide.<int>  d:W a b c:W  W(a) * W(b) + c
div.<int>  d a b  a / b
rem.<int>  d a b  a % b
neg.<int>  d a  T(-W(a))
abs.<int>  d a  T(a < 0 ? -W(a) : W(a))
min[.ftz].(<int>|<float>)  d a b  $smaller(a, b)
max[.ftz].(<int>|<float>)  d a b  $larger(a, b)
add[.rn][.ftz].<float>  d a b  a + b
sub[.rn][.ftz].<float>  d a b  a - b
mul[.rn][.ftz].<float>  d a b  a * b
(fma.rn|mad.rn|mad)[.ftz].<float>  d a b c  $fused(a, b, c)
div(.rn|.approx|.full)[.ftz].(f32|f64)  d a b  a / b
<function>[.approx|.rn][.ftz].<float>  d a  $apply("{function}", a)
and.(<bits>|pred)  d a b  a & b
or.(<bits>|pred)  d a b  a | b
xor.(<bits>|pred)  d a b  a ^ b
not.(<bits>|pred)  d a  $inverted(a)
shl.<bits>  d a b:uint32_t  b < 8 * sizeof(T) ? a << b : 0
shr.<number>  d a b:uint32_t  $shifted_right(a, b)
shf.<side>.<beyond>.b32  d a b c  $funnel(*"{side}" == 'l', *"{beyond}" == 'w', a, b, c)
bfe.<int>  d a b:uint32_t c:uint32_t  $extracted(a, b, c)
bfi.<bits>  d a b c:uint32_t e:uint32_t  $inserted(a, b, c, e)
brev.<bits>  d a  $reversed(a)
popc.<bits>  d:uint32_t a  __builtin_popcountll(a)
clz.<bits>  d:uint32_t a  $leading_zeros(a)
prmt.b32  d a b c  $permuted(a, b, c)
lop3.b32  d a b c e  $looked_up(a, b, c, e)
setp.<compare>[.ftz].<number>  d:bool a b  $compare("{compare}", a, b)
setp.<compare>.<logic>[.ftz].<number>  d:bool a b c:bool  $join("{logic}", $compare("{compare}", a, b), c)
selp.<number>  d a b c:bool  c ? a : b
cvt[.<round>][.ftz]<relu><sat>.<D>.<S>  d:D a:S  $convert<D>("{round}", *"{relu}", "{sat}", a)
cvt.<round><relu>.<half>x2.f32  d:$Pair<D> a b  {$convert<D>("{round}", *"{relu}", "", b), $convert<D>("{round}", *"{relu}", "", a)}
cvta.to.shared.u64  d a  $shared_address(a)
cvta.shared[::cta].u64  d a  uint64_t($at(".shared", a))
cvta[.to].(global|const|local|param).u64  d a  a
isspacep.shared[::cta]  d:bool a:uint64_t  $is_shared(a)
isspacep.global  d:bool a:uint64_t  !$is_shared(a)
mapa[.shared::cluster].u32  d a b  $in_block(a, b)
getctarank.shared::cluster.u32  d a  $block_of(a)
createpolicy.fractional.L2::(evict_first|evict_last|evict_normal|evict_unchanged).b64  d f?:float  $evict_first()
ld[.weak]<space><hints><vector>.<any>  {d} [a] q?  const auto r = *$at<T, N>("{space}", a);
ld.(volatile|relaxed|acquire)<scope><space><hints><vector>.<any>  {d} [a] q?  const auto r = $load_ordered<T, N>("{space}", a);
st[.weak]<space><hints><vector>.<any>  [a] {b} q?  *$at<T, N>("{space}", a) = b;
st.(volatile|relaxed|release)<scope><space><hints><vector>.<any>  [a] {b} q?  $store_ordered<T, N>("{space}", a, b);
atom<order><scope><space>.<update>[.noftz].<atomic>  d [a] b  $atomic("{update}", $at<T>("{space}", a), b)
atom<order><scope><space>.cas.<bits>  d [a] b c  atomicCAS($at<T>("{space}", a), b, c)
red<order><scope><space>.<update>[.noftz]<vector>.<atomic>  [a] {b} q?  $reduce<T, N>("{update}", $at<T>("{space}", a), b);
ldmatrix.sync.aligned[.m8n8].x<count><trans>[.m8n8][.shared[::cta]].b16  {d}:uint32_t [a]  uint32_t r[N]; $load<N>(r, $shared(a), *"{trans}", $SITE);
stmatrix.sync.aligned[.m8n8].x<count><trans>[.m8n8][.shared[::cta]].b16  [a] {b}:uint32_t  $store<N>($shared(a), b, *"{trans}", $SITE);
mma.sync.aligned.m16n8k(8|16).row.col.f32.<half>.(f16|bf16).f32  {d}:float {a}:uint32_t {b}:uint32_t {c}:float  float r[4] = c; const uint32_t x[4] = a, y[2] = b; $mma<$same("{half}", "bf16")>(r, x, y);
mma.sync.aligned.m16n8k(8|16).row.col.f16.f16.f16.f16  {d}:$Pair<$Half> {a}:uint32_t {b}:uint32_t {c}:$Pair<$Half>  const $Pair<$Half> h[2] = c; float s[4] = {h[0].x, h[0].y, h[1].x, h[1].y}; const uint32_t x[4] = a, y[2] = b; $mma<false>(s, x, y); const $Pair<$Half> r[] = {{s[0], s[1]}, {s[2], s[3]}};
mma.sync.aligned.m16n8k(4|8).row.col.f32.tf32.tf32.f32  {d}:float {a}:uint32_t {b}:uint32_t {c}:float  float r[4] = c; const uint32_t x[4] = a, y[2] = b; $mma_tf32(r, x, y);
wgmma.fence.sync.aligned    $multiply_fence();
wgmma.commit_group.sync.aligned    $multiply_commit();
wgmma.wait_group.sync.aligned  a:int  $wait(a, nullptr, -1, $SITE);
wgmma.mma_async.sync.aligned.m64n<columns>k16.f32.<half>.(f16|bf16)  {d}:& a:uint64_t b:uint64_t p:bool s:int z:int t:int u:int  static_assert(N == {columns} / 2); float* const x[] = d; $multiply_registers(x, nullptr, a, b, $same("{half}", "bf16"), u, p, s == 1 && z == 1 && t == 0);
wgmma.mma_async.sync.aligned.m64n<columns>k16.f32.<half>.(f16|bf16)  {d}:& {a}:uint32_t b:uint64_t p:bool s:int z:int u:int  static_assert(N == {columns} / 2); float* const x[] = d; const uint32_t y[4] = a; $multiply_registers(x, y, 0, b, $same("{half}", "bf16"), u, p, s == 1 && z == 1);
cp.async.(ca|cg).shared[::cta].global[.L2::<columns>B]  [a] [b] c:int  __pipeline_memcpy_async($shared(a), $at("", b), c);
cp.async.(ca|cg).shared[::cta].global[.L2::<columns>B]  [a] [b] c:int e:int  __pipeline_memcpy_async($shared(a), $at("", b), c, c - e);
cp.async.(ca|cg).shared[::cta].global.L2::cache_hint[.L2::<columns>B]  [a] [b] c:int q  __pipeline_memcpy_async($shared(a), $at("", b), c);
cp.async.commit_group    __pipeline_commit();
cp.async.wait_group  a:int  __pipeline_wait_prior(a);
cp.async.wait_all    $wait_for_copies();
cp.async.mbarrier.arrive.noinc<shared>.b64  [a]  $wait_for_copies(); $barrier_arrive($barrier(a));
cp.async.mbarrier.arrive<shared>.b64  [a]  $wait_for_copies(); $barrier(a);
cp.async.bulk.shared::(cluster|cta).global.mbarrier::complete_tx::bytes[.L2::cache_hint]  [a] [b] c:uint32_t [e] q?  $copy_bulk($shared(a), $at("", b), c, $barrier(e));
cp.async.bulk.global.shared::cta.bulk_group[.L2::cache_hint]  [a] [b] c:uint32_t q?  $store_bulk($at("", a), $shared(b), c);
cp.async.bulk.prefetch.L2.global[.L2::cache_hint]  [a] b q?  
cp.async.bulk.commit_group    $store_tiles_commit();
cp.async.bulk.wait_group[.read]  a:int  $finish_stores(a);
cp.async.bulk.tensor.<dimensions>d.shared::(cluster|cta).global[.tile].mbarrier::complete_tx::bytes[.L2::cache_hint]  [a] [b] {c}:int [e] q?  const int x[4] = c; $load_tile($shared(a), $map(b), x[0], x[1], x[2], x[3], $barrier(e));
cp.async.bulk.tensor.<dimensions>d.shared::cluster.global[.tile].mbarrier::complete_tx::bytes.multicast::cluster[.L2::cache_hint]  [a] [b] {c}:int [e] m:uint32_t q?  const int x[4] = c; $load_tile_to_blocks(m, $shared(a), $map(b), x[0], x[1], x[2], x[3], $barrier(e));
cp.async.bulk.tensor.<dimensions>d.global.shared::cta[.tile].bulk_group[.L2::cache_hint]  [a] {c}:int [b] q?  const int x[4] = c; $store_tile($map(a), x[0], x[1], x[2], x[3], $shared(b));
cp.async.bulk.prefetch.tensor.<dimensions>d.L2.global[.tile][.L2::cache_hint]  [a] {c}:int q?  
prefetch[.param|.const].tensormap  [a]  
prefetch[u][.global|.local](.L1|.L2|.L2::evict_last|.L2::evict_normal)  [a]  
mbarrier.init<shared>.b64  [a] b:uint32_t  $barrier_init($barrier(a), b);
mbarrier.inval<shared>.b64  [a]  $barrier(a);
mbarrier.arrive<order><scope><shared>.b64  d:uint64_t [a] b?:uint32_t=1  $arrive_at(a, b)
mbarrier.arrive.expect_tx<order><scope><shared>.b64  d:uint64_t [a] b:uint32_t  $expect_at(a, b)
mbarrier.expect_tx<order><scope><shared>.b64  [a] b:uint32_t  $barrier_add($barrier(a), b, $SITE);
mbarrier.(try_wait|test_wait)[.parity]<order><scope><shared>.b64  d:bool [a] b:uint32_t c?  $barrier_test($barrier(a), b)
st.async[.weak].shared::cluster.mbarrier::complete_tx::bytes<vector>.(b32|u32|s32|f32)  [a] {b}:uint32_t [c]  const uint32_t x[N] = b; $send_words<N>($here(a), $block_of(a), x, $barrier(c));
fence.proxy.async[.shared::cta|.shared::cluster]    $proxy_fence();
fence.proxy.async.global    
fence.mbarrier_init.release.cluster    $barrier_init_fence();
fence[.sc|.acq_rel|.acquire|.release].(cluster|gpu|sys)    __threadfence();
fence[.sc|.acq_rel|.acquire|.release].cta    __threadfence_block();
membar.(gl|sys)    __threadfence();
membar.cta    __threadfence_block();
(bar|barrier)[.cta].sync[.aligned]  a:int n?:int=$block_threads()  a == 0 && n == $block_threads() ? __syncthreads() : $named_barrier_sync(a, n);
(bar|barrier)[.cta].arrive[.aligned]  a:int n:int  $named_barrier_arrive(a, n);
bar.warp.sync  a:uint32_t  __syncwarp(a);
barrier.cluster.arrive[.release|.relaxed][.aligned]    $cluster_arrive();
barrier.cluster.wait[.acquire][.aligned]    $cluster_wait();
setmaxnreg.inc.sync.aligned.u32  a  $raise_registers<a>();
setmaxnreg.dec.sync.aligned.u32  a  $lower_registers<a>();
griddepcontrol.launch_dependents    $allow_next();
griddepcontrol.wait    $wait_for_previous();
shfl.sync.<lanes>.b32  d|p a b c e  $shuffled(*"{lanes}", a, b, c, e, p)
vote.sync.all.pred  d a b:uint32_t  __all_sync(b, a)
vote.sync.any.pred  d a b:uint32_t  __any_sync(b, a)
vote.sync.ballot.b32  d a:bool b  __ballot_sync(b, a)
redux.sync.<update>.(u32|s32|b32)  d a b:uint32_t  $reduced("{update}", a, b)
match.any.sync.<bits>  d:uint32_t a b:uint32_t  $matching(a, b)
activemask.b32  d  __activemask()
elect.sync  d|p:uint32_t b:uint32_t  $elected(b, p)
nanosleep.u32  a  $poll_again();
trap    __trap();
exit    $exit_thread();
"""
SPECIAL = {
    "laneid": "$self().thread % 32",
    "warpid": "$self().thread / 32",
    "nwarpid": "$self().block->warp_count",
    **{f"tid.{x}": f"$self().thread_idx.{x}" for x in "xyz"},
    **{f"ctaid.{x}": f"$self().block->index.{x}" for x in "xyz"},
    **{f"ntid.{x}": f"$self().block->launch->block.{x}" for x in "xyz"},
    **{f"nctaid.{x}": f"$self().block->launch->grid.{x}" for x in "xyz"},
    "cluster_ctarank": "$rank()",
    "cluster_ctaid.x": "$rank()",
    "cluster_nctarank": "$blocks_of_cluster()",
    "cluster_nctaid.x": "$blocks_of_cluster()",
    "clusterid.x": "$self().block->index.x / $blocks_of_cluster()",
    "nclusterid.x": "$self().block->launch->grid.x / $blocks_of_cluster()",
    "lanemask_eq": "1u << $self().thread % 32",
    "lanemask_lt": "(1u << $self().thread % 32) - 1",
    "lanemask_le": "~0u >> (31 - $self().thread % 32)",
    "lanemask_gt": "~(~0u >> (31 - $self().thread % 32))",
    "lanemask_ge": "~((1u << $self().thread % 32) - 1)",
}




class _Refused(Exception):
    """An instruction, or a part of it, that the emulator does not take."""


@dataclass(frozen=True)
class Row:
    """One row of TABLE."""

    instruction: str
    operands: str = ""
    code: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The names of the instructions of this row."""
        syntax = {".": r"\.", "(": "(?:", "[": "(?:", "]": ")?"}
        text = re.sub(r"[.(\[\]]", lambda found: syntax[found[0]], self.instruction)
        return re.compile(re.sub(r"<(\w+)>", lambda m: f"(?P<{m[1]}>{CLASSES[m[1]]})", text))


ROWS = [Row(*map(str.strip, line.split("  ", 2))) for line in TABLE.strip().splitlines()]


def table() -> str:
    """Return what the emulator takes, as a table in Markdown."""
    rows: dict[str, list[str]] = {}
    for row in ROWS:
        rows.setdefault(row.instruction.replace("|", r"\|"), []).append(row.operands)
    lines = [f"| `{name}` | {len(all_operands)} |" for name, all_operands in rows.items()]
    return "\n".join(["| instruction | forms |", "|---|---|", *lines])


def is_foreign(source: bytes) -> bool:
    """Return whether a source may contain what translate() replaces."""
    return bool(FOREIGN.search(source) or ASM.search(source.decode("latin-1")))


def translate(text: str, own: Path) -> str:
    """Return preprocessed source in which calls have replaced the inline PTX.

    A pointer replaces `extern __shared__ T name[]`.

    The headers in the folder `own` and the system's may contain the CPU's assembly, which is kept.
    Raises BuildError for what is not in TABLE, with file and line.
    """
    parts, end = [], 0
    for number, found in enumerate(ASM.finditer(text)):
        marker = MARKER.match(text, text.rfind("\n# ", 0, found.start()) + 1)
        if not marker or "3" in marker[3] or Path(marker[2]).parent == own:
            continue
        file, line = marker[2], int(marker[1]) + text.count("\n", marker.end(), found.start())
        sections, close = _pieces(text, found.end(), ":")
        try:
            code = _Asm(sections, number, f'"{file}", {line}').code
        except _Refused as error:
            raise BuildError(f"{Path(file).name}:{line}: error: {error}") from None
        for inner in MARKER.finditer(text, found.start(), close):
            line = int(inner[1]) - text.count("\n", found.start(), inner.end())
        line += text.count("\n", found.start(), close)
        parts += [text[end : found.start()], code, f'\n# {line} "{file}"\n']
        end = close
    text = DYNAMIC.sub(_pointer, "".join([*parts, text[end:]]))
    return ALIGNED.sub(r"\1 static thread_local", text)


def _pointer(found: re.Match[str]) -> str:
    """Replace an array `extern __shared__` in a function by a pointer."""
    *alignments, kind, name = found.groups()
    alignment = next(filter(None, alignments), "128")
    memory = f"::attention::emulator::this_fiber().block->shared.align({alignment})"
    return f"{kind}* const {name} = reinterpret_cast<{kind}*>({memory});"


def _pieces(text: str, at: int, separator: str) -> tuple[list[str], int]:
    """Split what is up to a closing parenthesis; return the pieces and where it ends."""
    pieces, depth, begin = [], 0, at
    for token in TOKEN.finditer(text, at):
        if token[0] in ("(", "[", "{"):
            depth += 1
        elif token[0] in (")", "]", "}"):
            depth -= 1
            if depth < 0:
                return [*pieces, text[begin : token.start()]], token.end()
        elif token[0] == separator and depth == 0:
            pieces.append(text[begin : token.start()])
            begin = token.end()
    return [*pieces, text[begin:]], len(text)


class _Asm:
    """An asm statement; `code` is its translation, one line."""

    def __init__(self, sections: Sequence[str], number: int, place: str) -> None:
        self.number, self.place, self.declared, self.count = number, place, set[str](), 0
        sections = [MARKER.sub("", section) for section in sections]
        if unquoted := STRING.sub("", sections[0]).strip():
            raise _Refused(f"the text of an asm must be string literals, not {unquoted}")
        text = "".join(
            found[2] if found[3] is None else ast.literal_eval(found[3])
            for found in STRING.finditer(sections[0])
        )
        code, texts = [], []
        for piece in [*_operands(sections[1:2]), *_operands(sections[2:3])]:
            found = re.fullmatch(r'\s*"([=+]?)[&%]?(\w)"\s*\((.*)\)\s*', piece, re.S)
            if not found or found[2] not in "rlhfdnC0123456789" or (found[1] and found[2] in "nC"):
                raise _Refused(f"the CPU emulator does not take the operand {piece.strip()}")
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
        choices, refused = {}, _Refused("")
        for kinds in itertools.product(("f16", "bf16"), repeat=len(names)):
            condition = " && ".join(
                f'$same({name}, "{kind}")' for name, kind in zip(names, kinds, strict=True)
            )
            filled = text
            for name, kind in zip(names, kinds, strict=True):
                filled = re.sub(rf"%{name[4:]}\b", kind, filled)
            try:
                choices[condition] = self._body(filled)
            except _Refused as error:
                refused = error
        if not choices:
            raise refused
        branches = [f"if constexpr ({one}) {{ {body} }}" for one, body in choices.items()]
        return f"static_assert({' || '.join(choices)}); {' else '.join(branches)}"

    def _body(self, text: str) -> str:
        """Translate the text of instructions."""
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).replace("%%", "%")
        code = []
        for brace, label, statement, rest in STATEMENT.findall(text):
            if rest:
                raise _Refused(f"`;` is missing after {rest}")
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
        negated, guard, opcode, rest = GUARDED.fullmatch(statement).groups()
        if opcode == ".reg":
            return self._registers(*rest.split(maxsplit=1))
        if opcode in ("bra", "bra.uni"):
            code = f"goto {self._label(rest)};"
        else:
            code = f"{{ {self._instruction(statement, opcode, rest)} }}"
        return f"if ({negated or ''}$get<bool>({self._value(guard)})) {code}" if guard else code

    def _registers(self, kind: str, names: str) -> str:
        kinds = {"pred": "bool", "f32": "float", "f64": "double", "f16x2": "uint32_t"}
        kinds |= {f"{sign}{n}": f"uint{n}_t" for sign in "bsuf" for n in (8, 16, 32, 64)} | kinds
        if kind[1:] not in kinds:
            raise _Refused(f"the CPU emulator has no register of type {kind}")
        declared = []
        for name in map(str.strip, names.split(",")):
            many = re.fullmatch(r"(.*)<(\d+)>", name)
            declared += [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]
        self.declared.update(declared)
        return f"{kinds[kind[1:]]} {', '.join(map(self._value, declared))};"

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
        if re.fullmatch(r"[-+]?(\d[\d.]*(e[-+]?\d+)?|0[xX][0-9a-fA-F]+)[uU]?", token):
            return token
        if token == "_":
            return "$sink"
        raise _Refused(f"the CPU emulator has no register {token}")

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
        raise _Refused(
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
        wanted = [OPERAND.fullmatch(word).groups() for word in row.operands.split()]
        if len(given) > len(wanted) or any(not one[3] for one in wanted[len(given) :]):
            return None
        for (shape, *_), (form, tokens) in zip(wanted, given, strict=False):
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
        for (shape, name, second, _, kind, default), (_, tokens) in itertools.zip_longest(
            wanted, given, fillvalue=("", ())
        ):
            kind = filled(kind or "T")
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
                names |= {second[1]: self._value([*tokens, "_"][1])} if second else {}
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
    return [one for text in sections for one in _pieces(text, 0, ",")[0] if one.strip()]
