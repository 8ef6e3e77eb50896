"""Asynchronous training as a whole: which roles a run has, and how each is wired to the world it runs in.

    trainer      slots, verified files, optimizer steps          refimpl/grpo/trainer.py
                 and the origin of the weights                   refimpl/shardcast/origin.py
    relay        passes weights on                               refimpl/shardcast/relay.py
    validator    checks every file against slot and replay       refimpl/grpo/validator.py
    worker       generates with the weights it has               refimpl/grpo/worker.py

In reading order: `plan` (what all nodes agree on), `seats` (the roles, wired), `outfit` (what they work with: a model
and files here, stand-ins in the simulator), `bench` (how a unit is made and checked), `student` (what is trained),
`shards` (over several processes), `weights` (how versions travel), `prices` (what all of it costs, in virtual time),
`plain` (the same run without any of them: the reference that the roles are held against), `launch` (processes),
`__main__`.
"""
