"""vLLM engines that span hosts: membership, rendezvous, and the processes of further hosts."""
