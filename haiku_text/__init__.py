"""Language models for `haiku_template`: GPT-2, BERT, tokens, generation of text."""
