"""The code scorer: what it takes of a completion, what a problem's tests are, and who is right. The executor runs things."""
