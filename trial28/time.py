"""Check and time variants: a child does the work, and if it hangs, another goes on without that variant."""
import json, math, os, signal, statistics, sys, time, traceback
from pathlib import Path
import torch
from attention_kernels.ladder.op import build_all, resolve
HERE = Path(__file__).parent
V25 = "attention_kernels/csrc/fp32/v25_split_keys.cu"
FILES = [V25] + [str(f) for f in sorted(HERE.glob("variants/*.cu"))] + [str(f) for f in sorted(Path("attention_kernels/csrc/fp32").glob("v2[89]_*.cu"))]
H, OUT = 12, Path(os.environ.get("OUT", "/tmp"))
if sys.argv[1:] == ["build"]:
    build_all("cuda", [resolve(f) for f in FILES])
    for f in FILES:
        try: resolve(f).load()
        except Exception as e: print(f, e)
    sys.exit()

def ref(q, k, v, s, c):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    t = q @ k.transpose(-1, -2) * s
    if c: t.masked_fill_(torch.ones(t.shape[-2:], dtype=torch.bool, device=t.device).triu(1), -math.inf)
    return (t.softmax(-1) @ v).transpose(1, 2)
def naive(q, k, v, s, c):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    t = q @ k.transpose(-1, -2) * s
    if c: t.masked_fill_(torch.ones(t.shape[-2:], dtype=torch.bool, device=t.device).triu(1), -math.inf)
    return (t.softmax(-1) @ v).transpose(1, 2)
CASES = [(1, 1, 1, True, .125, 1, 0), (1, 64, 2, True, .125, 1, 0), (2, 65, 3, True, .125, 1, 0), (1, 129, 2, True, -.3, 1, 0),
         (2, 300, 3, True, .125, 1, 0), (1, 100, 2, True, .125, 1e4, 0), (1, 200, 2, False, 0.0, 1, 0), (1, 513, 12, True, .125, 8, 0),
         (1, 1030, 3, False, .125, 1, 0), (2, 2049, 12, True, .125, 1, 0), (1, 4096, 2, True, .125, 1, 0), (1, 4096, 2, False, .125, 1, 2.5)]
def check(name, attention):
    bad, told = 0, []
    for b, n, h, c, s, spread, offset in CASES:
        torch.manual_seed(n)
        q, k, v = (torch.randn(b, n, 3, h, 64, device="cuda") * spread).unbind(2)
        v += offset
        r = ref(q, k, v, s, c)
        row = lambda x: ((x - r).norm(dim=-1) / r.norm(dim=-1)).nan_to_num(9.0).max().item()
        o = attention(q, k, v, s, c); torch.cuda.synchronize()
        same = torch.equal(o, attention(q, k, v, s, c))
        e, p = row(o), row(naive(q, k, v, s, c))
        is_bad = not (e <= 2 * p + 1e-6) or not same
        bad += is_bad
        told.append(f"{b}x{n}{'c' if c else 'f'} {e:.1e}/{p:.1e}{'' if same else ' UNSTABLE'}{' BAD' if is_bad else ''}")
    print(f"CHECK {name} {'ok' if not bad else 'BAD'}: " + ", ".join(told), flush=True)
def capture(calls):
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side): calls(2)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph): calls(None)
    return graph
def measure(timed, b, n, c=True, rounds=7):
    count = max(2, min(80, int(60e6 / (b * H * n * 64 * 12))))
    sets = [torch.randn(b, n, 3, H, 64, device="cuda").unbind(2) for _ in range(count)]
    runs = {name: capture(lambda limit, a=a: [a(q, k, v, .125, c) for q, k, v in sets[:limit]]) for name, a in timed.items()}
    samples = {name: [] for name in runs}
    x, y = torch.cuda.Event(True), torch.cuda.Event(True)
    for i in range(rounds + 1):
        for name, graph in runs.items():
            graph.replay(); x.record(); graph.replay(); y.record(); y.synchronize()
            if i: samples[name].append(1e3 * x.elapsed_time(y) / count)
    flops = 4 * b * H * n * n * 64 * (.5 if c else 1)
    print(f"TIME B={b} N={n} {'causal' if c else 'full'}", flush=True)
    for name, s in samples.items():
        m = statistics.median(s)
        print(f"  {name:28} {m:9.2f} us ({min(s):.2f} .. {max(s):.2f}) {flops / m / 1e6:6.1f} TFLOP/s", flush=True)
def child(todo, write):
    timed = {}
    for f in todo:
        os.write(write, (f + "\n").encode())
        name = Path(f).stem
        attention = resolve(f).load().attention
        if "ablate" not in name: check(name, attention)
        else:
            q, k, v = torch.randn(1, 300, 3, H, 64, device="cuda").unbind(2)
            attention(q, k, v, .125, True); torch.cuda.synchronize()
        timed[name] = attention
    os.write(write, b"timing\n")
    for b, n, c in [(4, 4096, True), (1, 512, True), (1, 1024, True), (1, 4096, True), (4, 4096, False), (1, 128, True), (4, 1024, True)]:
        measure(timed, b, n, c)
todo, start, LIMIT = list(FILES), time.monotonic(), float(os.environ.get("LIMIT", "12"))
while todo and time.monotonic() - start < 60:
    read, write = os.pipe(); os.set_blocking(read, False)
    pid, at, last = os.fork(), None, time.monotonic()
    if pid == 0:
        code = 1
        try: child(todo, write); code = 0
        except BaseException: traceback.print_exc()
        finally: sys.stdout.flush(); sys.stderr.flush(); os._exit(code)
    status = None
    while True:
        try:
            if text := os.read(read, 4096): at, last = text.decode().split()[-1], time.monotonic()
        except BlockingIOError: pass
        done, status = os.waitpid(pid, os.WNOHANG)
        if done: break
        if time.monotonic() - last > (30 if at == "timing" else LIMIT):
            os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0); status = 9; break
        time.sleep(0.02)
    if status == 0 or at == "timing" or at is None: break
    print(f"FAILED in {at} (status {status})", flush=True)
    todo.remove(at)
print(f"{time.monotonic() - start:.1f} s")
