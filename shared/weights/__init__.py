"""How weights move: snapshots, and the transports that carry them."""
