"""OpenAI's HTTP interface onto the queue. All state is in Redis, which many gateways may serve.

A request becomes a job; its tokens come back as server-sent events. Never imports MLX.
"""
