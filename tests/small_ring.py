"""A small ring in one process, for the tests of its roles: a seven-layer model, nodes s0, s1, ..., and a client."""

import numpy as np
import torch

from refimpl.engine import TorchEngine
from refimpl.identity import Identity
from refimpl.model.config import ModelConfig
from refimpl.model.weights import load_decoder, random_decoder, save_checkpoint
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.messages import Complete
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.worlds.local import LocalFabric

LAYERS, HIDDEN, VOCABULARY = 7, 24, 61
CONFIG = ModelConfig(
    family="qwen2",
    layers=LAYERS,
    hidden=HIDDEN,
    intermediate=40,
    query_heads=4,
    kv_heads=2,
    head_dim=6,
    vocabulary=VOCABULARY,
    positions_max=256,
    tied_head=True,
    qkv_bias=True,
    name="ring-test",
)
CUTS = {1: (7,), 2: (3, 7), 3: (1, 5, 7), 4: (2, 3, 6, 7), 5: (1, 2, 4, 6, 7)}


def make_checkpoint(folder):
    torch.set_num_threads(1)
    return save_checkpoint(random_decoder(CONFIG, seed=3, std=0.25), folder)


def config_of(stages, **changes):
    fields = {
        "ring": "test",
        "layers": LAYERS,
        "hidden": HIDDEN,
        "dtype": "float32",
        "cuts": CUTS[stages],
        "micro_batches": 2,
        "rows": 3,
        "capacity_tokens": 64,
        "prefill_tokens": 5,
        "overdue_s_min": 20.0,
        "top_k": 16,
        "chunk_tokens": 8,
    }
    return RingConfig(**(fields | changes))


class SmallRing:
    """Nodes of one ring in one process, and a client."""

    def __init__(self, checkpoint, stages, *, spares=0, log=None, line=None, stage=None, fabric=None, **changes):
        self.fabric = fabric or LocalFabric(run_seed=1)
        self.checkpoint, self.line = checkpoint, line
        self.stage_config = stage or StageConfig(hop_timeout_s=5.0)
        self.names = [f"s{i}" for i in range(stages + spares)]
        self.nodes = {name: Identity.from_seed(1, name).public_key for name in self.names}
        self.config = config_of(stages, **changes)
        self.records, self.stages, self.worlds = [], {}, {}
        for name in self.names:
            self.start(name)
        self.new_head(log)
        self.client = self.fabric.node("client")

    def new_head(self, log=None):
        world, stage = self.worlds["s0"], self.stages["s0"]
        self.head = Head(world, self.config, stage, self.nodes, log=log, journal=self.journal("s0"))

    def journal(self, name):
        return lambda kind, /, **fields: self.records.append((name, kind, fields))

    def start(self, name):
        world = self.worlds[name] = self.fabric.node(name, self.line) if self.line else self.fabric.node(name)
        parts = torch_parts(self.checkpoint, dtype=self.config.dtype, device="cpu")
        identity = Identity.from_seed(1, name)
        self.stages[name] = Stage(world, self.stage_config, identity, parts, self.journal(name))
        return self.stages[name]

    def run(self, main):
        async def body():
            self.head.serve()
            self.worlds["s0"].spawn(self.head.run(), "head")
            for name in self.names[1:]:
                self.stages[name].serve()
                self.worlds[name].spawn(self.stages[name].run(), "stage")
            return await main(self)

        return self.fabric.run(body())

    def answer(self, prompts, new, seeds=None, timeout_s=60.0):
        """Ask as a client does; returns (answers, log-probabilities, reasons)."""
        message = ask(prompts, new, seeds)

        async def main(ring):
            return await ring.client.call("s0", message, timeout_s)

        done = self.run(main)
        return [a.tolist() for a in done.answers], [p.tolist() for p in done.logprobs], list(done.reasons)


def ask(prompts, new, seeds=None):
    return Complete(
        tuple(f"r{i}" for i in range(len(prompts))),
        tuple(np.array(p, np.int32) for p in prompts),
        tuple(new),
        tuple(seeds or range(len(prompts))),
    )


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCABULARY, n).tolist() for n in lengths]


def one_process(checkpoint, prompts, new, seeds, sampling, stop=frozenset(), dtype=torch.float32):
    """Each sequence by itself, in one process, by the engine."""
    engine = TorchEngine(load_decoder(checkpoint, dtype=dtype, device="cpu"), name="one", proof=None, batch_max=1)
    answers, logprobs = [], []
    for prompt, count, seed in zip(prompts, new, seeds, strict=True):
        (done,) = engine.generate([prompt], sampling=sampling, seeds=[seed], max_new_tokens=count, eos_ids=stop)
        answers.append(done.tokens.tolist())
        logprobs.append(done.logprobs.tolist())
    return answers, logprobs
