"""Trains Ember on text that the grammar writes while it trains, and exports a Hugging Face folder.

    python train.py --tokenizer .. --out OUT_DIR [--seconds 400]

The learning rate follows the clock: it is constant for the first part of `--seconds`, then falls to zero.
"""

import argparse
import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

import corpus
from model import Config, Ember, export
from optim import Muon

LENGTH = corpus.MAX_TOKENS


def shard(job):
    """Writes and encodes one shard of documents: int16 token ids."""
    path, seed, count = job
    tokenizer = Tokenizer.from_file(path)
    encoded = tokenizer.encode_batch(corpus.documents(seed, count), add_special_tokens=False)
    return np.fromiter((i for e in encoded for i in e.ids), dtype=np.int16)


class Corpus:
    """Token ids on the device, growing while training runs; batches start at the beginning of a document."""

    def __init__(self, args, ids, device):
        self.ids, self.device = ids, device
        self.tokens = torch.zeros(args.corpus, dtype=torch.int16, device=device)
        self.starts = torch.zeros(args.corpus // 50, dtype=torch.int64, device=device)
        self.filled = self.documents = 0
        jobs = ((str(args.tokenizer / "tokenizer.json"), f"train-{seed}", args.shard) for seed in range(10**6))
        self.pool = multiprocessing.get_context("spawn").Pool(args.workers)
        threading.Thread(target=self.fill, args=(jobs,), daemon=True).start()

    def fill(self, jobs):
        # A bounded window of jobs in flight, so that workers stop when the corpus is full.
        waiting = [self.pool.apply_async(shard, (next(jobs),)) for _ in range(2 * self.pool._processes)]
        while True:
            piece = torch.from_numpy(waiting.pop(0).get()).to(self.device)
            starts = (piece == self.ids[corpus.BOS]).nonzero()[:, 0] + self.filled
            if self.filled + len(piece) > len(self.tokens) or self.documents + len(starts) > len(self.starts):
                return self.pool.terminate()
            self.tokens[self.filled : self.filled + len(piece)] = piece
            self.starts[self.documents : self.documents + len(starts)] = starts
            self.filled, self.documents = self.filled + len(piece), self.documents + len(starts)
            waiting.append(self.pool.apply_async(shard, (next(jobs),)))

    def batch(self, size):
        """Windows [size, LENGTH + 1], a twentieth of which begin without the <|bos|> token."""
        at = self.starts[torch.randint(self.documents, (size,), device=self.device)]
        at = at + (torch.rand(size, device=self.device) < 0.05)
        at = at.clamp(max=self.filled - LENGTH - 1)
        return self.tokens[at[:, None] + torch.arange(LENGTH + 1, device=self.device)].long()


def targets(window, ids):
    """Next tokens, with -100 where a user or the system speaks: Ember need not predict those."""
    inputs, outputs = window[:, :-1], window[:, 1:]
    at = torch.arange(inputs.shape[1], device=window.device)
    never = torch.full_like(at, -1)
    asks = torch.where((inputs == ids[corpus.USER]) | (inputs == ids[corpus.SYSTEM]), at, never).cummax(1).values
    told = torch.where((inputs == ids[corpus.ASSISTANT]) | (inputs == ids[corpus.BOS]), at, never).cummax(1).values
    return torch.where(asks > told, -100, outputs)


def loss_of(model, window, wanted):
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)


def held_out(args, ids, device):
    """Windows of unseen documents, from a seed of their own; each begins where a document begins."""
    tokens = torch.from_numpy(shard((str(args.tokenizer / "tokenizer.json"), "held-out", 20 * args.eval)).astype(np.int64))
    starts = (tokens == ids[corpus.BOS]).nonzero()[:, 0]
    starts = starts[starts < len(tokens) - LENGTH - 1][:: 20][: args.eval]
    return tokens[starts[:, None] + torch.arange(LENGTH + 1)].to(device)


@torch.no_grad()
def evaluate(model, windows, ids, cast):
    """Mean held-out loss, and the mean over each quarter of the context."""
    sums, counts = torch.zeros(4), torch.zeros(4)
    for window in windows.split(16):
        wanted = targets(window, ids)
        with cast():
            logits = model(window[:, :-1]).float()
        loss = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=-100, reduction="none")
        quarters = loss.view(len(window), 4, -1)
        sums += quarters.sum((0, 2)).cpu()
        counts += (wanted != -100).view(len(window), 4, -1).sum((0, 2)).cpu()
    return {"loss": float(sums.sum() / counts.sum()), "by_quarter_of_context": [round(x, 4) for x in (sums / counts).tolist()]}


def arguments():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--tokenizer", type=Path, default=Path(".."), help="folder with tokenizer.json")
    args.add_argument("--out", type=Path, required=True)
    args.add_argument("--seconds", type=float, default=400, help="training time, corpus start-up excluded")
    args.add_argument("--batch", type=int, default=32, help="windows of 2048 tokens a step")
    args.add_argument("--lr", type=float, default=3e-3)
    args.add_argument("--corpus", type=int, default=600_000_000, help="most tokens to write")
    args.add_argument("--shard", type=int, default=4000, help="documents a shard")
    args.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args.add_argument("--eval", type=int, default=256, help="held-out windows")
    args.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args.add_argument("--no-compile", dest="compile", action="store_false")
    return args.parse_args()


def rate(done):
    """The learning rate's factor when `done` of the time is over."""
    return min(1.0, done / 0.02, max(0.0, (1 - done) / 0.6))


def main():
    args = arguments()
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in corpus.SPECIAL}
    config = Config(vocab_size=tokenizer.get_vocab_size())
    data = Corpus(args, ids, args.device)
    model = Ember(config).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1] + [model.embed_tokens.weight]
    optimizers = [Muon(matrices, args.lr), torch.optim.AdamW(others, args.lr, betas=(0.9, 0.95), weight_decay=0.0)]
    cast = lambda: torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")
    step_loss = torch.compile(loss_of, dynamic=False) if args.compile else loss_of
    windows = held_out(args, ids, args.device)
    while data.filled < 20 * args.batch * LENGTH:
        time.sleep(0.2)

    curve, step, start, shown = [], 0, None, 0.0
    while start is None or time.time() - start < args.seconds:
        window = data.batch(args.batch)
        with cast():
            loss = step_loss(model, window, targets(window, ids))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        done = 0.0 if start is None else (time.time() - start) / args.seconds
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * max(rate(done), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if start is None:  # the clock starts once the first step, which compiles, is over
            loss.item()
            start = time.time()
        if step % 20 == 0:  # waiting here also keeps the clock true
            value, now = loss.item(), time.time() - start
            if now - shown > min(20, args.seconds / 20):
                seen = step * args.batch * LENGTH
                curve.append({"step": step, "tokens": seen, "seconds": round(now, 1), "loss": round(value, 4)})
                print(f"{now:6.1f} s  step {step:6}  {seen / 1e6:7.1f} M tokens  corpus {data.filled / 1e6:6.1f} M  loss {value:.4f}", flush=True)
                shown = now

    export(model, args.out, ids)
    final = evaluate(model, windows, ids, cast)
    summary = {"steps": step, "tokens": step * args.batch * LENGTH, "corpus_tokens": data.filled, "held_out": final, "curve": curve}
    (args.out / "training.json").write_text(json.dumps(summary, indent=1) + "\n")
    print("held out:", final)
    data.pool.terminate()


if __name__ == "__main__":
    main()
