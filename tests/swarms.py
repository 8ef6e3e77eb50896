"""A small swarm in which everything happens: churn, restarts, crashes, hangs, lost messages, cheats. No model runs."""

from __future__ import annotations

import tomllib

from sim.scenario import Scenario

TROUBLED = """
title = "A small swarm in trouble"
shows = "That logs are the same every time, whatever goes wrong."
seed = 3
duration_s = 1800.0

[model.calibrated]
size = "Llama-3.1-8B"
table = "smollm2"
answer_tokens_median = 200.0
answer_tokens_sigma = 0.8

[task]
batch = 3
assignments = 4
pause_s = 60.0
heartbeat_s = 20.0
answer_tokens_max = 1024

[network]
regions = "p2p"
jitter_ms = 5.0

[[nodes]]
name = "ledger"
role = "ledger"
device = "L4"
region = "north-america"
uplink_mbit_s = 1000.0
downlink_mbit_s = 1000.0

[[nodes]]
name = "orchestrator"
role = "orchestrator"
device = "L4"
region = "north-america"
uplink_mbit_s = 1000.0
downlink_mbit_s = 1000.0

[[nodes]]
name = "validator"
role = "validator"
device = "H100 SXM"
region = "europe"
uplink_mbit_s = 1000.0
downlink_mbit_s = 1000.0

[[nodes]]
name = "steady"
count = 8
role = "worker"
device = "RTX 4090"
region = "europe"
uplink_mbit_s = 20.0
downlink_mbit_s = 40.0
latency_ms = 12.0
loss_fraction = 0.01

[[nodes]]
name = "fleeting"
count = 12
role = "worker"
device = "RTX 3090"
region = "japan"
uplink_mbit_s = 10.0
downlink_mbit_s = 20.0
latency_ms = 12.0

[nodes.life]
session = { kind = "exponential", mean_s = 200.0 }
absence = { kind = "exponential", mean_s = 60.0 }
restart_every = { kind = "exponential", mean_s = 300.0 }
restart_disk_lost = 0.5

[[nodes]]
name = "cheat"
count = 3
role = "worker"
behaviour = "layers-skipped"
device = "RTX 4090"
region = "north-america"
uplink_mbit_s = 20.0
downlink_mbit_s = 50.0

[[faults]]
kind = "link"
nodes = ["steady-0", "fleeting"]
start_s = 20.0
end_s = 400.0
message_loss = 0.1
message_duplicate = 0.1
message_reorder = 0.2

[[faults]]
kind = "hang"
nodes = ["orchestrator"]
start_s = 50.0
end_s = 80.0

[[faults]]
kind = "crash"
nodes = ["validator"]
start_s = 120.0
end_s = 150.0

[[faults]]
kind = "partition"
regions = ["japan"]
start_s = 200.0
end_s = 260.0

[[faults]]
kind = "slow"
nodes = ["steady-1"]
start_s = 10.0
slowness = 3.0
"""


def troubled() -> Scenario:
    """The scenario of this file."""
    return Scenario.model_validate(tomllib.loads(TROUBLED))
