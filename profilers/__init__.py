"""How it is measured: graphs, clocks, probes, ranks, and the on-disk schema."""
