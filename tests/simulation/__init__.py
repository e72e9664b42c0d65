"""A deterministic simulation of instances, the Redis tier, its servers and the network.

The product's own code runs: vLLM's scheduler with the connector's scheduler side, the worker side
with its job queue, and the whole Redis tier down to the bytes on the wire. What it stands on is
simulated: threads, locks, clocks, sockets and random numbers (`stdlib`, `network`, put in the place
of Python's own by `loading`), Redis servers (`redis_model`), LMCache's engine (`lmcache_model`) and
the model's forward pass (`kv_memory`). In half of the worlds instances are each other's peers:
their servers run over sockets that listen (`serving`), and prompts are handed over. One
operating-system thread runs everything, so a seed decides the whole course of events, and simulated
time passes as fast as the code runs.

Each seed draws a *world* (`plan`): instances, prompts that share prefixes, clients that abort, and
faults that begin and end (`faults`). `world` says what must hold in it, `at_rest` what must agree
whenever an engine has nothing to do, and `recovery` what must come back afterwards.

    python -m tests.simulation --seconds 60 --jobs 2     # as many seeds as fit into a minute
    python -m tests.simulation --seed 123 --trace        # one of them again, with all that happens
    python -m tests.mutants --simulation                 # planted bugs must be found

A failure prints its seed and the command that repeats it. Any change of the code may change what a
seed means; on the same code it always means the same.

Why tasks under simulated primitives, and no product code written as steps: lanes, readers, writers
and the lookup block where that reads best, and the interleavings worth testing are those of their
locks. The simulation needs no interface of the product beyond the standard library's, so it keeps
working when the product changes.
"""
