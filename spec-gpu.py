import time, torch, numpy as np, traceback
from vllm.utils.torch_utils import get_accelerator_view_from_cpu_tensor
from penstock.services.rollout.engines.vllm.decoding.siblings import guess, agreed


def reference(tok, ln, row, texts, d):
    own = tok[row, : ln[row]]
    best = 0
    for t in texts:
        if t < 0:
            continue
        for end in range(1, ln[t]):
            m = 0
            while m < 8 and end - 1 - m >= 0 and ln[row] - 1 - m >= 0 and tok[t, end - 1 - m] == own[ln[row] - 1 - m]:
                m += 1
            if m:
                best = max(best, (m << 52) | (end << 16) | int(t))
    if not best:
        return [0] * d
    t, end = best & 0xFFFF, (best >> 16) & 0xFFFFFFFFF
    rest = max(ln[t] - end, 1)
    return [int(tok[t, end + i % rest]) for i in range(d)]


try:
    rng = np.random.default_rng(0)
    for vocab, length in ((5, 90), (50, 300)):
        tok = torch.from_numpy(rng.integers(0, vocab, (32, 2048)).astype(np.int32)).pin_memory()
        ln = torch.from_numpy(rng.integers(1, length, 32).astype(np.int32))
        rows = torch.arange(0, 16, dtype=torch.int32)
        texts = torch.stack([torch.tensor([r, (r + 1) % 32, 20, -1], dtype=torch.int32) for r in range(16)])
        out = torch.zeros(32, 7, dtype=torch.int64, device="cuda")
        guess(get_accelerator_view_from_cpu_tensor(tok), ln.cuda(), rows.cuda(), texts.cuda(), 512, out)
        got = out.cpu()
        bad = sum(
            got[int(r)].tolist() != reference(tok.numpy(), ln.numpy(), int(r), texts[i].tolist(), 7)
            for i, r in enumerate(rows)
        )
        print("reference", vocab, length, "wrong", bad, "of", len(rows))
    for n, S, L in ((4, 4, 512), (32, 8, 512), (32, 8, 4096), (32, 8, 16384)):
        tok = torch.randint(0, 50000, (256, 32768), dtype=torch.int32).pin_memory()
        dev = get_accelerator_view_from_cpu_tensor(tok)
        ln = torch.full((256,), L, dtype=torch.int32, device="cuda")
        rows = torch.arange(n, dtype=torch.int32, device="cuda")
        texts = (torch.arange(n)[:, None] // S * S + torch.arange(S)).to(torch.int32).cuda()
        out = torch.zeros(256, 7, dtype=torch.int64, device="cuda")
        for which, t in (("uva", dev), ("device", tok.cuda())):
            for _ in range(3):
                guess(t, ln, rows, texts, L + 256, out)
            torch.cuda.synchronize()
            a = time.perf_counter()
            for _ in range(100):
                guess(t, ln, rows, texts, L + 256, out)
            b = time.perf_counter()
            torch.cuda.synchronize()
            c = time.perf_counter()
            print("guess", n, S, L, which, "launch ms", round((b - a) * 10, 4), "device ms", round((c - a) * 10, 4))
except Exception:
    traceback.print_exc()
