"""The ring as real processes over HTTP: same tokens as one process, also when one of them is killed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from refimpl.engine import TorchEngine
from refimpl.identity import Identity
from refimpl.model.sampler import Sampling
from refimpl.model.weights import load_decoder
from refimpl.pipeline.__main__ import arguments_of, main, node_file, prepared
from refimpl.pipeline.launch import LaunchError, NodeFile, started
from refimpl.pipeline.node import lean_code, untouched_code
from refimpl.tokenizer import chat_ids, load_tokenizer

TINY = Path(__file__).parent / "data" / "tiny-model"
PROMPTS = ["12+34=", "9031467>"]


@pytest.fixture(scope="module")
def truth():
    """Prompts and the answers of one process."""
    tokenizer = load_tokenizer(TINY)
    ids = [chat_ids(tokenizer, prompt) for prompt in PROMPTS]
    engine = TorchEngine(load_decoder(TINY, dtype=torch.float32, device="cpu"), name="tiny", proof=None, batch_max=1)
    done = engine.generate(
        ids, sampling=Sampling(temperature=0.5), seeds=[0, 1], max_new_tokens=40, eos_ids=frozenset()
    )
    return ids, [completion.tokens.tolist() for completion in done]


def options(*more):
    base = ["--model", str(TINY), "--dtype", "float32", "--new-tokens", "40", "--temperature", "0.5", "--rows", "2"]
    return arguments_of().parse_args([*base, "--capacity-tokens", "64", *more])


def without_stops(configs):
    for config in configs:
        config["ring"]["stop_tokens"] = []
        config["ring"]["overdue_s_min"] = 10.0
        config["unread"] = "x" * 200_000  # more than a command's argument may be: so long are many prompts
    return configs


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--signed", "--latency-ms", "4", "--micro-batches", "2", "--rows", "1"]])
def test_processes_answer_as_one_does(truth, more):
    """Three stages, three processes; plain, and signed with two micro-batches over slow links."""
    ids, answers = truth
    given = options("--stages", "3", *more)
    entries, configs = prepared(given, node_file(given), ids)
    with started(entries, without_stops(configs)) as children:
        assert children[0].read() == {"up": 1}
        assert children[0].read()["answers"] == answers
        keys = {child.public_key for child in children}
        assert len(keys) == 3 and not keys & {Identity.from_seed(0, child.entry.name).public_key for child in children}


@pytest.mark.slow
def test_a_killed_process_leaves_no_trace(truth):
    """SIGKILL to the middle stage while it works; the spare process takes its layers."""
    ids, answers = truth
    given = options("--stages", "3", "--spares", "1", "--latency-ms", "40")
    entries, configs = prepared(given, node_file(given), ids)
    with started(entries, without_stops(configs)) as children:
        assert children[0].read() == {"up": 1}
        children[1].process.kill()
        result = children[0].read()
        assert result["answers"] == answers and result["epoch"] == 2


@pytest.mark.slow
def test_the_command_picks_its_schedule(capsys):
    """Measured on the ring itself, and said; the answers are those of a ring that was told."""
    base = ["--model", str(TINY), "--dtype", "float32", "--prompt", "12+34=", "--prompt", "7+8=", "--new-tokens", "6"]
    said = []
    for more in ("1", "auto"):
        assert main([*base, "--micro-batches", more]) == 0
        said.append(capsys.readouterr().out)
    assert said[0].split("tokens in")[0] == said[1].split("tokens in")[0]
    assert re.search(
        r"picked [12] micro-batch\(es\) of [12]: at best .*; measured: 1 rows .* \+ .* ms, 2 rows", said[1]
    )


@pytest.mark.slow
def test_the_command_refuses_a_record_of_another_prompt(capsys, tmp_path):
    """The old answer is not printed under a new question: one sentence, with the record and the request."""
    base = ["--model", str(TINY), "--dtype", "float32", "--stages", "1", "--new-tokens", "6"]
    base += ["--record", str(tmp_path / "record")]
    assert main([*base, "--prompt", "12+34="]) == 0
    answered = capsys.readouterr().out
    assert main([*base, "--prompt", "12+35="]) == 1
    said = capsys.readouterr()
    assert "> 12+34=" in answered and ">" not in said.out
    assert f"error: node 'stage0': record {tmp_path / 'record'}: request '0-0' is there with prompt (" in said.err


@pytest.mark.slow
def test_the_command_prints_answers(capfd):
    assert main(["--model", str(TINY), "--dtype", "float32", "--prompt", "12+34=", "--new-tokens", "6"]) == 0
    out = capfd.readouterr().out
    assert "stage0: layers 0..1" in out and "> 12+34=" in out and "tokens/s" in out


LOADS = """
import sys
from pathlib import Path
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.messages import Member, RingPlan
member = Member(name="a", public_key="", first=3, end=5)
plan = RingPlan(
    ring="r", epoch=1, version=1, checkpoint="", layers=5, hidden=64, dtype="float32", members=(member,),
    micro_batches=1, rows=1, capacity_tokens=8, window=1, signed=False, keep_evidence=False, chunk_tokens=32, top_k=128,
    sampling_temperature=float(sys.argv[2]), sampling_top_k=0, sampling_top_p=1.0,
)
import refimpl.pipeline.node
parts = torch_parts(sys.argv[1], dtype="float32", device="cpu")
parts.commit(plan), parts.load(plan, member)
print("numba" in sys.modules)
"""


@pytest.mark.parametrize(("temperature", "compiled"), [("0", False), ("0.7", True)])
def test_a_stage_that_signs_and_draws_nothing_loads_no_compiler(temperature, compiled):
    """130 MB of a process are a compiler and what it compiles: only for proofs and for draws at random."""
    said = subprocess.run([sys.executable, "-c", LOADS, str(TINY), temperature], capture_output=True, text=True)
    assert said.stdout == f"{compiled}\n", said.stderr


FORGETS = """
from pathlib import Path
import refimpl.pipeline.node as node
def code_mb(): return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("RssFile")) / 1024
before = code_mb()
node.lean_code()
after = code_mb()
one = node.torch.ones(3, 5)
print(before - after > 40, (one @ one.T)[0, 0].item())
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is looked up in Linux's /proc")
def test_a_stage_gives_back_the_code_that_only_imports_ran():
    """Some 65 MB; and what is called afterwards is there again."""
    said = subprocess.run([sys.executable, "-c", FORGETS], capture_output=True, text=True)
    assert said.stdout == "True 5.0\n", said.stderr


def area(edges: bytes, mode: bytes, path: bytes, *sizes_kb: int) -> bytes:
    """An area of /proc/self/smaps and as much as it says of itself: dirty, anonymous, swapped."""
    said = zip((b"Private_Dirty", b"Anonymous", b"Swap"), sizes_kb, strict=False)
    return b"%s %s 00000000 08:01 12 %s\n" % (edges, mode, path) + b"".join(b"%s: %9d kB\n" % pair for pair in said)


SMAPS = b"".join(
    (
        area(b"7f00-7f20", b"r-xp", b"/usr/lib/caf\xe9.so", 0, 0, 0),
        b"VmFlags: rd ex mr mw me\n",
        area(b"7f20-7f50", b"r-xp", b"/usr/lib/patched.so", 4, 0, 0),
        area(b"7f50-7f60", b"r-xp", b"/usr/lib/swapped.so", 0, 0, 8),
        area(b"7f60-7f70", b"r-xp", b"/usr/lib/written.so", 0, 4, 0),
        area(b"7f70-7f80", b"r-xp", b"/usr/lib/unsaid.so", 0),
        area(b"7f80-7f90", b"r--p", b"/usr/lib/data.so", 0, 0, 0),
        area(b"7f90-7fa0", b"r-xp", b"[vdso]", 0, 0, 0),
    )
)


def test_only_code_that_was_never_written_to_is_given_back():
    """Not what is dirty, swapped out, anonymous, no file's code, or not said to be clean."""
    assert untouched_code(SMAPS) == [(0x7F00, 0x20)]


@pytest.mark.parametrize("failure", [PermissionError("hidden"), FileNotFoundError("no /proc"), OSError("gone")])
def test_a_stage_lives_where_the_system_hides_what_is_mapped(monkeypatch, failure):
    def refused(path):
        raise failure

    monkeypatch.setattr(Path, "read_bytes", refused)
    lean_code()


def test_a_model_that_fits_nowhere_is_an_error_sentence(tmp_path, capsys):
    """The sentence of the partition reaches the user."""
    file = tmp_path / "ring.toml"
    file.write_text(f'model = "{TINY}"\ndtype = "float32"\n[[node]]\nname = "a"\nmemory_gb = 0.0001\n')
    assert main(["--nodes", str(file), "--prompt", "1+1="]) == 1
    assert "bytes short" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model = 3 4", "ring.toml"),
        ('dtype = "float32"', "expected model"),
        ('model = "m"\n[[node]]\nname = "a"\nspeed = 3', r"unknown \['speed'\]"),
        ('model = "m"\n[[node]]\nhost = "a"', "or no name"),
        ('model = "m"\nlayers = 3\n[[node]]\nname = "a"', r"unknown: \['layers'\]"),
    ],
)
def test_a_bad_node_file_names_the_field(tmp_path, text, says):
    file = tmp_path / "ring.toml"
    file.write_text(text)
    with pytest.raises(LaunchError, match=says):
        NodeFile.read(file)
