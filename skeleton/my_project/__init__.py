"""A model, a task and data for haiku_template."""
