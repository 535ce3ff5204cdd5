"""Between rank 0's event loop and the training threads: commands in, results out, through two queues."""
