"""Beside the experience streams: dead letters, the rehearsal's rows, statistics of scores and problems' signals."""
