"""The dataflow's state machine: every decision, without sockets, tasks or a clock."""
