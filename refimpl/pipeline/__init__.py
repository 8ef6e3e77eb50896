"""Pipeline-parallel inference: a model that fits no single device, cut into stages that pass activations on.

Cores: `partition` (who holds which layers), `schedule` (who computes what next), `blame` (who is guilty), `watch` (who
waits for whom). Roles: `stage`, `head`. Wire messages: `messages`.
"""
