"""Simulation of a whole cluster in one process: real state machines, and a simulated network, disk and clock.

One seed gives one run: the plan of the run, the order of its events and its faults. A run has no threads, no sockets
and no sleeps, so a seed always gives the same run. `python -m simulation` runs many seeds. From the bottom up:

- `clock`, `scheduler`: simulated time; coroutines that belong to a process, which can be killed or stopped
- `network`, `lanes`, `disk`: calls that get lost, late or doubled; connections that keep the order of messages; the
  checkpoint storage, and the store of the coordinator
- `plan`: what a seed decides: the members, the job, and the faults with their times
- `invariants`: what must hold after each event
- `nodes`: coordinator, server and worker, around the state machines of the product
- `planted`: bugs that the simulation must find
- `places`: where shards must be when servers have come and gone
- `cluster`: one run of one plan
- `shrink`: a smaller plan that fails in the same way
- `campaign`, `__main__`: many seeds, on several processors
"""
