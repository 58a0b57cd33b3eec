"""The APIs that agents speak: each reads its requests and writes its answers, both pure.

`common` has the request that all become; `chat_*` is OpenAI's chat completions, `responses_*` its
Responses API, `anthropic_*` Anthropic's Messages API, and `token_ids` vLLM's endpoint for ids.
"""
