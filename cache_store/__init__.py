"""What outlives an engine process: KV pages, KDA states and the turn ledger, in Redis."""
