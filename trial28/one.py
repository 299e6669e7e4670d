import sys, torch
from attention_kernels.ladder.op import resolve
a = resolve(sys.argv[1]).load().attention
q, k, v = torch.randn(4, 4096, 3, 12, 64, device="cuda").unbind(2)
for _ in range(3): a(q, k, v, .125, True)
torch.cuda.synchronize()
