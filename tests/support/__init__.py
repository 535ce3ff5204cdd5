"""Tools that tests share: servers, tiny models, real processes to play with, and tables of expectations."""
