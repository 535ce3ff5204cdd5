"""Parts of formulas that the losses in ``rules`` share; none of them knows packing, ranks or DeepSpeed."""
