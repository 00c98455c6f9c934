"""The paths of OpenAI's endpoints, over HTTP and in the lines of its Batch API."""

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
RESPONSES_URL, EMBEDDINGS_URL = "/v1/responses", "/v1/embeddings"
