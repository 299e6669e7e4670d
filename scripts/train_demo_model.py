"""Train the bundled demo model (`--model demo`) on a text file, on one GPU, in minutes.

    python scripts/train_demo_model.py --corpus gutenberg_children.txt.xz

The corpus is plain text (optionally .xz) whose documents are separated by a line `<|endoftext|>`.
The script cleans it, trains a byte-level BPE in GPT-2's file format, trains transformers' own
GPT2LMHeadModel in bfloat16 autocast with float32 master weights (Muon for the matrices, AdamW for
the rest), and writes config.json, generation_config.json, model.safetensors (float16), vocab.json,
merges.txt, tokenizer_config.json and the model card README.md. Whole documents are held out and
written to held_out.txt.xz; the loss and the bits per byte in the card are those of the *exported*
float16 weights.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import lzma
import math
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2_infer.cli import Parser
from gpt2_infer.perplexity import HELD_OUT
from gpt2_infer.tokenizer import END_OF_TEXT

STRAIGHT = str.maketrans(
    {
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{EM DASH}": "--",
        "\N{EN DASH}": "-",
        "\N{HORIZONTAL ELLIPSIS}": "...",
        "\N{NO-BREAK SPACE}": " ",
    }
)
HOLD_OUT_EVERY = 40  # one book in this many is held out
CHAPTER = re.compile(r"^(chapter|part|book|letter|canto)\b.{0,40}$", re.IGNORECASE)
OPENING = r"(?:^|(?<=[\s(])|(?<=--))"
SPEECH_MARK = re.compile(
    rf"(?P<phrase>{OPENING}'\w[\w -]{{0,40}}\w'(?!\w))|(?P<opens>{OPENING}'(?=\w))"
    r"|(?P<closes>(?<=[.,!?;:-])'(?=[\s)]|$|--))"
)


def read_documents(path: Path) -> list[str]:
    """Read the documents of a corpus file, unprocessed."""
    data = path.read_bytes()
    raw = (lzma.decompress(data) if path.suffix == ".xz" else data).decode("utf-8")
    return [text for part in raw.split(f"{END_OF_TEXT}\n") if (text := part.strip())]


def is_story(document: str) -> bool:
    """Return whether a book is children's prose, not scholarship (long words) or verse."""
    sample = document[:400_000]
    words = re.findall(r"[A-Za-z']+", sample)
    paragraphs = re.split(r"\n\s*\n", sample)
    verse = sum(len(text) for text in paragraphs if text.strip().count("\n") >= 2)
    return sum(map(len, words)) < 4.42 * len(words) and verse < 0.3 * len(sample)


def american(chapter: str) -> str:
    """Swap single and double quotation marks in a chapter whose speech is in single ones.

    An apostrophe may look like an opening mark ('tis, 'em). A mark before a capital letter opens
    speech; one before a small letter resumes speech that was closed earlier in the paragraph.
    """
    if len(re.findall(rf"{OPENING}'(?=[A-Z])", chapter, re.MULTILINE)) < len(
        re.findall(rf'{OPENING}"(?=[A-Z])', chapter, re.MULTILINE)
    ):
        return chapter
    paragraphs = []
    for paragraph in chapter.replace('"', "\0").split("\n\n"):
        is_open = was_open = False

        def turn(match: re.Match[str]) -> str:
            nonlocal is_open, was_open
            if match["phrase"]:
                return match[0] if is_open else f'"{match[0][1:-1]}"'
            starts = match.string[match.end() : match.end() + 1].isupper()
            if match["opens"] and (starts or (was_open and not is_open)):
                is_open = was_open = True
            elif match["closes"] and is_open:
                is_open = False
            else:
                return "'"
            return '"'

        paragraphs.append(SPEECH_MARK.sub(turn, paragraph))
    return "\n\n".join(paragraphs).replace("\0", "'")


def clean(document: str) -> list[str]:
    """Return the prose of one book, split into its chapters.

    A model of seven million parameters has none to spare for typography: speech gets one kind of
    quotation mark; underscores for italics, illustrations, headings, verse and tables of contents
    are removed.
    """
    chapters: list[list[str]] = [[]]
    text = re.sub(r"\[[^\]]{0,300}\]", "", document.translate(STRAIGHT)).replace("_", "")
    for paragraph in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in paragraph.strip().splitlines() if line.strip()]
        if not lines:
            continue
        if len(lines) == 1 and CHAPTER.match(lines[0]):
            chapters.append([])
            continue
        is_heading = not re.search(r"[a-z]", paragraph) or lines[-1][-1].isalnum()
        if not is_heading and len(lines) < 3:
            chapters[-1].append(re.sub(r"\s+", " ", " ".join(lines)))
    return [american("\n\n".join(chapter)) for chapter in chapters if sum(map(len, chapter)) > 400]


def train_tokenizer(texts: list[str], vocab_size: int, out: Path) -> ByteLevelBPETokenizer:
    """Train a byte-level BPE in GPT-2's format; `<|endoftext|>` is the last id, as in GPT-2."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts, vocab_size=vocab_size - 1, min_frequency=2, show_progress=False
    )
    tokenizer.save_model(str(out))
    vocab_file = out / "vocab.json"
    vocab = json.loads(vocab_file.read_text("utf-8"))
    if len(vocab) != vocab_size - 1 or END_OF_TEXT in vocab:
        sys.exit(f"the corpus gives {len(vocab)} tokens, too few for a vocabulary of {vocab_size}")
    vocab[END_OF_TEXT] = len(vocab)
    vocab_file.write_text(json.dumps(vocab, ensure_ascii=False), "utf-8")
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": 1024,
        "add_prefix_space": False,
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return tokenizer


def encode(
    tokenizer: ByteLevelBPETokenizer, texts: list[str], end_of_text: int, device: torch.device
) -> torch.Tensor:
    """Encode the texts as one stream of ids, (tokens,), each text preceded by `<|endoftext|>`."""
    ids: list[torch.Tensor] = []
    for start in tqdm(range(0, len(texts), 512), desc="tokenize", unit="batch"):
        for encoding in tokenizer.encode_batch(texts[start : start + 512]):
            ids.append(torch.tensor([end_of_text, *encoding.ids], dtype=torch.int32))
    return torch.cat(ids).to(device)


@torch.no_grad()
def held_out_nats(model: torch.nn.Module, stream: torch.Tensor, context: int, batch: int) -> float:
    """Sum the negative log-likelihood (nats) over adjacent windows of `context` tokens."""
    total = 0.0
    windows = (stream.numel() - 1) // context
    x = stream[: windows * context].view(windows, context)
    y = stream[1 : windows * context + 1].view(windows, context)
    for inputs, targets in zip(torch.split(x, batch), torch.split(y, batch), strict=True):
        logits = model(inputs.long()).logits.float().flatten(0, 1)
        total += F.cross_entropy(logits, targets.long().flatten(), reduction="sum").item()
    return total * (stream.numel() - 1) / (windows * context)


class Batches:
    """Random blocks of `context + 1` tokens: an epoch visits each once, from a random offset."""

    def __init__(self, stream: torch.Tensor, context: int, batch: int, seed: int) -> None:
        self.stream, self.context, self.batch = stream, context, batch
        self.generator = torch.Generator(device=stream.device).manual_seed(seed)
        self.starts = torch.empty(0, dtype=torch.long, device=stream.device)

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.starts.numel() < self.batch:
            device, context = self.stream.device, self.context
            offset = int(torch.randint(context, (1,), generator=self.generator, device=device))
            blocks = (self.stream.numel() - 1 - offset) // context
            order = torch.randperm(blocks, generator=self.generator, device=device)
            self.starts = torch.cat([self.starts, offset + order * context])
        starts, self.starts = self.starts[: self.batch], self.starts[self.batch :]
        index = starts[:, None] + torch.arange(self.context + 1, device=starts.device)
        tokens = self.stream[index].long()
        return tokens[:, :-1], tokens[:, 1:]


class Repetitions:
    """Batches of text in which a phrase of 3 to 40 tokens is repeated over and over."""

    COUNTED = 4  # number of repetitions that enter the loss

    def __init__(self, batches: Batches, rows: int) -> None:
        self.stream, self.context, self.rows = batches.stream, batches.context, rows
        self.generator = batches.generator

    def __next__(self) -> tuple[torch.Tensor, ...]:
        """Return tokens, their targets, the positions one phrase earlier, and which targets count.

        All are (rows, context).
        """

        def draw(low: int, high: int) -> torch.Tensor:
            size, device = (self.rows, 1), self.stream.device
            return torch.randint(low, high, size, generator=self.generator, device=device)

        phrase, before = draw(3, 41), draw(8, self.context // 2)
        place = torch.arange(self.context + 1, device=self.stream.device)
        source = torch.where(place < before, place, before + (place - before) % phrase)
        tokens = self.stream[draw(0, self.stream.numel() - self.context) + source].long()
        earlier = (place[:-1] - phrase).clamp(min=0)
        again = (place[1:] - before) // phrase
        return tokens[:, :-1], tokens[:, 1:], earlier, (again >= 1) & (again <= self.COUNTED)


def repetition_loss(
    logits: torch.Tensor, y: torch.Tensor, earlier: torch.Tensor, counts: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy against the prediction made one phrase earlier, modified.

    The target halves the probability of the repeated token, as in DITTO (Xu et al., 2022): without
    this loss, greedy text soon repeats itself for good. The other tokens share the rest in their
    old proportions. DITTO leaves that open; without it, the rest went to tokens that never occur.
    """
    log_p = logits.float().log_softmax(-1)
    rows = torch.arange(len(y), device=y.device)[:, None]
    before = log_p.detach().exp()[rows, earlier]
    repeated = y[..., None]
    half = 0.5 * before.gather(2, repeated)
    others = before.scatter(2, repeated, 0)
    target = (others * ((1 - half) / others.sum(-1, keepdim=True))).scatter(2, repeated, half)
    return -((target * log_p).sum(-1) * counts).sum() / counts.sum()


class Muon:
    """Momentum with orthogonalized updates, as in torch.optim.Muon (match_rms_adamw).

    Matrices of one shape form one batch, and the learning rate is a tensor, for the CUDA graph.
    """

    def __init__(self, matrices: list[torch.Tensor], weight_decay: float) -> None:
        self.weight_decay = weight_decay
        shapes = dict.fromkeys(p.shape for p in matrices)
        self.groups = [[p for p in matrices if p.shape == shape] for shape in shapes]
        self.momenta = [torch.zeros_like(torch.stack(group)) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: torch.Tensor) -> None:
        """Update the matrices from their gradients."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradients = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradients, 0.05)
            x = gradients.lerp(momentum, 0.95).bfloat16()
            is_tall = x.size(1) > x.size(2)
            x = x.mT if is_tall else x
            x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
            for _ in range(5):  # Newton-Schulz iterations
                a = x @ x.mT
                b = torch.baddbmm(a, a, a, beta=-4.775, alpha=2.0315)
                x = torch.baddbmm(x, b, x, beta=3.4445)
            x = x.mT if is_tall else x
            updates = x * (lr * 0.2 * math.sqrt(max(x.shape[1:])))
            for p, update in zip(group, updates, strict=True):
                p.mul_(1 - lr * self.weight_decay).sub_(update)


def captured(step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Run a step three times and capture it as a CUDA graph: without it, launches dominate."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return loss

    return replay


def train(
    model: GPT2LMHeadModel, batches: Batches, held_out: torch.Tensor, args: argparse.Namespace
) -> list[Any]:
    """Train in place and keep the weights with the lowest held-out loss.

    Returns [[step, held-out loss in nats per token], ...].
    """
    device = held_out.device
    on_gpu = device.type == "cuda"
    matrices: list[torch.Tensor] = [
        p for name, p in model.named_parameters() if p.ndim == 2 and ".h." in name
    ]
    tables = [model.transformer.wte.weight, model.transformer.wpe.weight]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    lr_matrices, lr_tables = torch.zeros((), device=device), torch.zeros((), device=device)
    muon = Muon(matrices, args.weight_decay)
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr_tables,
        betas=(0.9, 0.95),
        fused=on_gpu,
        capturable=on_gpu,
        foreach=False,
    )
    repetitions = Repetitions(batches, max(1, args.batch // 4))

    def draw() -> tuple[torch.Tensor, ...]:
        return (*next(batches), *(next(repetitions) if args.repetitions else ()))

    given = [tensor.clone() for tensor in draw()]

    def loss_of(x: torch.Tensor, y: torch.Tensor, *repeated: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(x, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
            if repeated:
                again = model(repeated[0], use_cache=False).logits
                loss = loss + args.repetitions * repetition_loss(again, *repeated[1:])
        return loss

    compiled = torch.compile(loss_of) if args.compile else loss_of

    def one_step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = compiled(*given)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step(lr_matrices)
        adam.step()
        return loss.detach()

    step_once = captured(one_step) if on_gpu else one_step  # learning rates are still 0
    history: list[Any] = []
    best, weights = math.inf, model.state_dict()
    bar = tqdm(range(args.steps), desc="train", unit="step", mininterval=5)
    for step in bar:
        # Warm up, then decay along a cosine to zero.
        factor = min(1.0, (step + 1) / args.warmup)
        factor *= (1 + math.cos(math.pi * step / args.steps)) / 2
        lr_matrices.fill_(args.lr_matrices * factor)
        lr_tables.fill_(args.lr_tables * factor)
        for static, tensor in zip(given, draw(), strict=True):
            static.copy_(tensor)
        loss = step_once()
        if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
            model.eval()
            with torch.autocast(device.type, torch.bfloat16):
                nats = held_out_nats(model, held_out, args.context, 32) / (held_out.numel() - 1)
            model.train()
            history.append([step + 1, round(nats, 4)])
            if nats < best:
                best, weights = nats, copy.deepcopy(model.state_dict())
            bar.write(f"step {step + 1}: train {loss.item():.4f}, held out {nats:.4f}")
    model.load_state_dict(weights)
    return history


def model_card(facts: dict[str, Any]) -> str:
    """Return the text of the model card, from the contents of training.json."""
    arguments = facts["arguments"]
    return f"""# Demo model

A GPT-2 of {facts["parameters"] / 1e6:.1f} million parameters ({arguments["layers"]} layers,
{arguments["width"]} wide, {arguments["heads"]} heads of {arguments["width"] // arguments["heads"]},
{arguments["context"]} positions, a byte-level BPE of {arguments["vocab"]} tokens, tied embeddings),
stored as float16. It exists so that `gpt2-infer --model demo` writes real prose with no download.
It knows children's books of a hundred years ago and nothing else: sentences hold together, stories
do not, and the books' attitudes are those of their time. `--temperature 0.7 --top-k 40` reads best.

| | |
|---|---|
| data | {facts["books_kept"]} of {facts["books"]} children's books from Project Gutenberg, in the \
public domain in the USA: scholarship and verse are left out, typography is simplified |
| corpus file, SHA-256 | `{facts["corpus_sha256"]}` |
| tokens | {facts["train_tokens"] / 1e6:.1f} million to train on, \
{facts["tokens_seen"] / 1e6:.0f} million seen |
| against loops | a loss on repeated phrases, of weight {arguments["repetitions"]} |
| held out | {facts["held_out_books"]} whole books, {facts["held_out_tokens"]} tokens, \
{facts["held_out_bytes"]} bytes after cleaning: `held_out.txt.xz` |
| held-out loss of these float16 weights | {facts["held_out_loss"]:.4f} nats per token, \
{facts["bits_per_byte"]:.4f} bits per byte |
| trained on | {facts["device"]}, torch {facts["torch"]}, {facts["train_seconds"]:.0f} s |
| seed | {arguments["seed"]} |

The command (the corpus is not part of the repository):

    python scripts/train_demo_model.py --corpus {arguments["corpus"]} \\
        --steps {arguments["steps"]} --batch {arguments["batch"]} --seed {arguments["seed"]} \\
        --lr-matrices {arguments["lr_matrices"]} --lr-tables {arguments["lr_tables"]} \\
        --repetitions {arguments["repetitions"]}

`training.json` holds all arguments and the held-out loss by step.
"""


def main() -> None:
    """Parse arguments, train, export, write the model card."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="text or .xz, documents as described above")
    add("--out", type=Path, default=Path("gpt2_infer/demo_model"), help="output folder")
    add("--steps", type=int, default=12000, help="training steps")
    add("--batch", type=int, default=48, help="sequences per step")
    add("--context", type=int, default=1024, help="tokens per sequence")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--vocab", type=int, default=8192, help="vocabulary size")
    add("--lr-matrices", type=float, default=5e-3, help="peak learning rate of Muon")
    add("--lr-tables", type=float, default=3e-3, help="peak learning rate of AdamW")
    add("--weight-decay", type=float, default=0.2, help="weight decay of the matrices")
    add("--repetitions", type=float, default=0.3, help="weight of the loss on repeated phrases")
    add("--warmup", type=int, default=200, help="warm-up steps")
    add("--eval-every", type=int, default=500, help="steps between evaluations")
    add("--seed", type=int, default=1)
    add("--max-documents", type=int, help="number of documents to use, for a trial run")
    has_gpu = torch.cuda.is_available()
    add("--compile", action=argparse.BooleanOptionalAction, default=has_gpu)
    args = parser.parse_args()
    if not args.corpus.is_file():
        sys.exit(f"{args.corpus} is not a file")
    device = torch.device("cuda" if has_gpu else "cpu")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    documents = read_documents(args.corpus)[: args.max_documents]
    stories = [document for document in documents if is_story(document)]
    train_texts: list[str] = []
    held_out_texts: list[str] = []
    for i, document in enumerate(tqdm(stories, desc="clean", unit="book")):
        is_held_out = i % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2
        (held_out_texts if is_held_out else train_texts).extend(clean(document))
    if not held_out_texts:
        sys.exit(f"{len(stories)} books are too few: one in {HOLD_OUT_EVERY} is held out")
    tokenizer = train_tokenizer(train_texts, args.vocab, args.out)
    end_of_text = args.vocab - 1
    train_stream = encode(tokenizer, train_texts, end_of_text, device)
    held_out = encode(tokenizer, held_out_texts, end_of_text, device)
    separated = "".join(f"{text}\n{END_OF_TEXT}\n" for text in held_out_texts)
    (args.out / HELD_OUT.name).write_bytes(lzma.compress(separated.encode("utf-8"), preset=9))
    held_out_bytes = sum(len(text.encode("utf-8")) for text in held_out_texts)
    print(f"{train_stream.numel():,} tokens to train on, {held_out.numel():,} held out")

    config = GPT2Config(
        vocab_size=args.vocab,
        n_positions=args.context,
        n_embd=args.width,
        n_layer=args.layers,
        n_head=args.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).to(device)
    batches = Batches(train_stream, args.context, args.batch, args.seed)
    started = time.perf_counter()
    history = train(model, batches, held_out, args)
    seconds = time.perf_counter() - started

    model.eval().half().save_pretrained(args.out)
    # The card quotes the loss of the saved float16 weights, evaluated in float32.
    exported = GPT2LMHeadModel.from_pretrained(args.out, dtype=torch.float32).to(device).eval()
    torch.set_float32_matmul_precision("highest")
    nats = held_out_nats(exported, held_out, args.context, 32)
    loss, bits_per_byte = nats / (held_out.numel() - 1), nats / math.log(2) / held_out_bytes
    facts = {
        "parameters": sum(p.numel() for p in exported.parameters()),
        "corpus_sha256": hashlib.sha256(args.corpus.read_bytes()).hexdigest(),
        "books": len(documents),
        "books_kept": len(stories),
        "train_tokens": train_stream.numel(),
        "tokens_seen": args.steps * args.batch * args.context,
        "held_out_books": len(stories[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]),
        "held_out_tokens": held_out.numel(),
        "held_out_bytes": held_out_bytes,
        "held_out_loss": loss,
        "bits_per_byte": bits_per_byte,
        "train_seconds": seconds,
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "torch": torch.__version__,
        "held_out_loss_by_step": history,
        "arguments": vars(args) | {"corpus": args.corpus.name, "out": args.out.name},
    }
    (args.out / "training.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    (args.out / "README.md").write_text(model_card(facts), "utf-8")
    print(f"held-out loss {loss:.4f} nats per token, {bits_per_byte:.4f} bits per byte")


if __name__ == "__main__":
    main()
