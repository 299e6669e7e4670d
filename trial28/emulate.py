import sys, torch, math
from attention_kernels.ladder.op import resolve
def ref(q,k,v,s,c):
    q,k,v=(x.double().transpose(1,2) for x in (q,k,v)); t=q@k.transpose(-1,-2)*s
    if c: t.masked_fill_(torch.ones(t.shape[-2:],dtype=torch.bool).triu(1),-math.inf)
    return (t.softmax(-1)@v).transpose(1,2)
for f in sys.argv[1:]:
    a=resolve(f).load().attention; worst=0
    for n,c,scale,sp in [(1,True,.125,1),(64,True,.125,1),(65,True,.125,1),(129,True,-.3,1),(300,True,.125,1),(100,True,.125,1e4),(200,False,0.0,1),(260,False,.125,1),(193,True,0.125,8)]:
        torch.manual_seed(n); q,k,v=(torch.randn(1,n,3,2,64)*sp).unbind(2)
        r=ref(q,k,v,scale,c); o=a(q,k,v,scale,c); p=torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1,2) for x in (q,k,v)),is_causal=c,scale=scale).transpose(1,2)
        e=((o-r).norm(dim=-1)/r.norm(dim=-1)).max().item(); ep=((p-r).norm(dim=-1)/r.norm(dim=-1)).max().item()
        print(f"{n}{'c' if c else 'f'} {e:.1e}/{ep:.1e}", end="  ")
    print(f, flush=True)
