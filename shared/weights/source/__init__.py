"""The serving side of weight transfers."""
