"""vLLM engines that span hosts: who they are, where they meet, and the processes of the further hosts."""
