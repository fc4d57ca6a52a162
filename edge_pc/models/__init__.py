"""What is known of a model without running it: its sizes, its tokenizer, where its files are."""
