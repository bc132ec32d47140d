"""Who may share blocks: what the model, its weights, pages and adapters hold."""
