"""Model parts that several services share."""
