"""Route table of the HTTP server: handlers, and the description of each endpoint in the OpenAPI document."""

from __future__ import annotations

from quintet.frontend import health, kv
from quintet.frontend.api.anthropic import errors as anthropic_errors
from quintet.frontend.api.anthropic.messages import count_tokens, messages, render_messages
from quintet.frontend.api.anthropic.types import CountTokensBody, MessagesBody
from quintet.frontend.api.inference.generate import generate
from quintet.frontend.api.inference.types import DerenderChatBody, DerenderCompletionBody, GenerateBody
from quintet.frontend.api.openai.batch import batch
from quintet.frontend.api.openai.chat import chat_completions
from quintet.frontend.api.openai.completions import completions, invocations
from quintet.frontend.api.openai.derender import derender_chat, derender_completions
from quintet.frontend.api.openai.render import render_chat, render_completions
from quintet.frontend.api.openai.tokenize import detokenize, tokenize, tokenizer_info
from quintet.frontend.api.openai.types import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from quintet.frontend.api.pooling.embeddings import embeddings
from quintet.frontend.api.pooling.similarity import rerank, score
from quintet.frontend.api.pooling.types import EmbeddingBody, RerankBody, ScoreBody
from quintet.frontend.api.responses.conversations import conversation, conversations
from quintet.frontend.api.responses.conversations import item as conversation_item
from quintet.frontend.api.responses.conversations import items as conversation_items
from quintet.frontend.api.responses.create import count_input_tokens, render_responses, responses
from quintet.frontend.api.responses.stored import cancel_response, input_items, response
from quintet.frontend.api.responses.types import (
    ConversationBody,
    ConversationChange,
    ItemsBody,
    ResponsesBody,
)
from quintet.frontend.http.docs_page import check_public, docs, docs_part
from quintet.frontend.http.http_request import HttpRequest
from quintet.frontend.http.openapi import ANY, EVENTS, HTML, TEXT, delete, get, openapi_document, post, route
from quintet.frontend.kv import ExportBody, ImportBody, PrefixBody
from quintet.frontend.metrics import metrics
from quintet.frontend.resume.endpoints import ResumeStreamBody, resume_from_server, resume_stream
from quintet.frontend.service import Service

CHOICES = ("id", "object", "created", "model", "choices", "usage")
RENDERED = ("request_id", "token_ids", "sampling_params", "model")
RESPONSE = ("id", "object", "created_at", "status", "model", "output")
CONVERSATION = ("id", "object", "created_at", "metadata")
DATA = ("object", "data")

HELLO = {"messages": [{"role": "user", "content": "Hello!"}]}
BYE = [{"role": "user", "content": "Bye!"}]
COMPLETION = {"prompt": "def fibonacci(n):", "max_tokens": 32, "temperature": 0}
INPUT = {"input": "Hello!", "max_output_tokens": 32}
GENERATED = {"choices": [{"token_ids": [1, 2, 3], "finish_reason": "stop"}]}


async def openapi(service: Service, http_request: HttpRequest) -> None:
    check_public(service)
    config = service.config.frontend
    await http_request.respond_json(openapi_document(ROUTES, bool(config.api_keys), config.root_path))


ROUTES = (
    route(
        "/v1/completions",
        completions,
        post("Text completion", CompletionBody, COMPLETION),
        fields=CHOICES,
        is_streamed=True,
    ),
    route(
        "/v1/chat/completions",
        chat_completions,
        post("Chat completion", ChatBody, {**HELLO, "max_tokens": 32}),
        fields=CHOICES,
        is_streamed=True,
    ),
    route(
        "/v1/chat/completions/batch",
        batch,
        post(
            "Batch of chat completions; `messages` is a list of conversations",
            ChatBody,
            {"messages": [HELLO["messages"], BYE]},
        ),
        fields=CHOICES,
    ),
    route(
        "/v1/chat/completions/render",
        render_chat,
        post("Render a chat request to a body of `/inference/v1/generate`", ChatBody, HELLO),
        fields=RENDERED,
    ),
    route(
        "/v1/completions/render",
        render_completions,
        post("Render a completion request to bodies of `/inference/v1/generate`", CompletionBody, COMPLETION),
        fields=RENDERED,
        is_list=True,
    ),
    route(
        "/v1/chat/completions/derender",
        derender_chat,
        post(
            "Chat completion from a response of `/inference/v1/generate`",
            DerenderChatBody,
            {"generate_response": GENERATED},
        ),
        fields=CHOICES,
    ),
    route(
        "/v1/completions/derender",
        derender_completions,
        post(
            "Completion from responses of `/inference/v1/generate`, one per prompt",
            DerenderCompletionBody,
            {"generate_responses": [GENERATED]},
        ),
        fields=CHOICES,
    ),
    route(
        "/v1/messages",
        messages,
        post("Message (Anthropic API)", MessagesBody, {**HELLO, "max_tokens": 32}),
        fields=("id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage"),
        is_streamed=True,
        errors=anthropic_errors.ERRORS,
    ),
    route(
        "/v1/messages/count_tokens",
        count_tokens,
        post("Count the prompt tokens of a conversation", CountTokensBody, HELLO),
        fields=("input_tokens",),
        errors=anthropic_errors.ERRORS,
    ),
    route(
        "/v1/messages/render",
        render_messages,
        post(
            "Render a message request to a body of `/inference/v1/generate`",
            MessagesBody,
            {**HELLO, "max_tokens": 32},
        ),
        fields=RENDERED,
        errors=anthropic_errors.ERRORS,
    ),
    route(
        "/v1/responses",
        responses,
        post("Response (OpenAI Responses API)", ResponsesBody, INPUT),
        fields=RESPONSE,
        is_streamed=True,
    ),
    route(
        "/v1/responses/render",
        render_responses,
        post("Render a response request to a body of `/inference/v1/generate`", ResponsesBody, INPUT),
        fields=RENDERED,
    ),
    route(
        "/v1/responses/input_tokens",
        count_input_tokens,
        post("Count the prompt tokens of a response request", ResponsesBody, INPUT),
        fields=("object", "input_tokens"),
    ),
    route(
        "/v1/responses/{id}",
        response,
        get("A stored response; with `stream=true` its events after number `starting_after`"),
        delete("Delete a stored response"),
        is_streamed=True,
    ),
    route(
        "/v1/responses/{id}/cancel", cancel_response, post("Cancel a background response"), fields=RESPONSE
    ),
    route("/v1/responses/{id}/input_items", input_items, get("Input items of a response, paged")),
    route(
        "/v1/conversations",
        conversations,
        post(
            "Create a conversation",
            ConversationBody,
            {"items": HELLO["messages"], "metadata": {"topic": "greetings"}},
        ),
        fields=CONVERSATION,
    ),
    route(
        "/v1/conversations/{id}",
        conversation,
        get("A conversation, without its items"),
        post(
            "Replace the metadata of a conversation", ConversationChange, {"metadata": {"topic": "weather"}}
        ),
        delete("Delete a conversation"),
        fields=("id", "object"),
    ),
    route(
        "/v1/conversations/{id}/items",
        conversation_items,
        get("Items of a conversation, paged"),
        post("Append items to a conversation", ItemsBody, {"items": BYE}),
        fields=("object", "data", "has_more"),
    ),
    route(
        "/v1/conversations/{id}/items/{item_id}",
        conversation_item,
        get("An item of a conversation"),
        delete("Delete an item of a conversation"),
    ),
    route(
        "/v1/embeddings",
        embeddings,
        post("Vectors of texts", EmbeddingBody, {"input": "Hello!"}),
        fields=("id", "object", "created", "model", "data", "usage"),
    ),
    *(
        route(
            path,
            score,
            post("Similarity of pairs of texts", ScoreBody, {"text_1": "Hello!", "text_2": ["Hi!", "Bye!"]}),
            fields=("id", "object", "created", "model", "data", "usage"),
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        route(
            path,
            rerank,
            post(
                "Documents by similarity to a query",
                RerankBody,
                {"query": "Hello!", "documents": ["Hi!", "Bye!"]},
            ),
            fields=("id", "model", "usage", "results"),
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    route(
        "/inference/v1/generate",
        generate,
        post(
            "Generate from token ids to token ids",
            GenerateBody,
            {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 32, "temperature": 0}},
        ),
        fields=("request_id", "choices", "usage"),
        is_streamed=True,
    ),
    route(
        "/v1/streams",
        resume_from_server,
        post(
            "Resume a stream of another server, from its request and the output received so far",
            ResumeStreamBody,
            {
                "path": "/v1/completions",
                "request": {"prompt": "Once", "stream": True, "max_tokens": 8},
                "position": "2",
                "outputs": [[11, 12]],
                "seeds": [7],
                "created": 1700000000,
            },
        ),
        content=EVENTS,
    ),
    route(
        "/v1/streams/{id}",
        resume_stream,
        get(
            "Resume a stream (header X-Stream-Id) after the position `from`: the part after the colon of the last event id"
        ),
        content=EVENTS,
    ),
    route("/v1/models", health.models, get("Served model names"), fields=DATA),
    route(
        "/v1/models/{id:path}",
        health.model,
        get("One served model name"),
        fields=("id", "object", "created", "owned_by"),
    ),
    route(
        "/tokenize",
        tokenize,
        post("Text or conversation to token ids", TokenizeBody, {"prompt": "Hello"}),
        fields=("count", "max_model_len", "tokens"),
    ),
    route(
        "/detokenize",
        detokenize,
        post("Token ids to text", DetokenizeBody, {"tokens": [1, 2, 3]}),
        fields=("prompt",),
    ),
    route(
        "/tokenizer_info", tokenizer_info, get("Configuration and chat template of the tokenizer, if enabled")
    ),
    route(
        "/health",
        health.health,
        get("200 if every process is healthy, else 503 with the unhealthy ones"),
        fields=("status", "processes", "missing"),
        answers_503=True,
    ),
    route("/livez", health.livez, get("200 while this frontend answers"), content=TEXT),
    route(
        "/readyz",
        health.readyz,
        get("200 while requests can be served"),
        fields=("ready", "missing", "draining"),
        answers_503=True,
    ),
    route("/ping", health.livez, get("As /livez"), post("As /livez"), content=TEXT),
    route(
        "/v2/health/live",
        health.v2_live,
        get("As /livez, for clients of KServe and Triton"),
        fields=("live",),
    ),
    route(
        "/v2/health/ready",
        health.readyz,
        get("As /readyz, for clients of KServe and Triton"),
        fields=("ready",),
        answers_503=True,
    ),
    route(
        "/v2/models/{id:path}/ready",
        health.v2_model_ready,
        get("200 while requests to the model can be served"),
        fields=("name", "ready"),
        answers_503=True,
    ),
    route(
        "/invocations",
        invocations,
        post(
            "Chat completion (`messages`) or completion (`prompt`), for SageMaker", CompletionBody, COMPLETION
        ),
        fields=CHOICES,
        is_streamed=True,
    ),
    route("/version", health.show_version, get("Version of the server"), fields=("version",)),
    route("/load", health.load, get("Live requests of this frontend"), fields=("server_load",)),
    route("/metrics", metrics, get("Metrics of all processes, in Prometheus text format"), content=TEXT),
    route(
        "/kv",
        kv.listing,
        get(
            "For operators: cached prefixes, most recently used first (`limit`); with `text=true` also as text"
        ),
        fields=("object", "data", "has_more", "engines"),
    ),
    route(
        "/kv/pin",
        kv.change("pin"),
        post("For operators: pin a prefix", PrefixBody, {"prompt": "You are a helpful assistant."}),
        fields=DATA,
    ),
    route(
        "/kv/unpin",
        kv.change("unpin"),
        post("For operators: unpin a prefix", PrefixBody, {"id": "c0ffee00"}),
        fields=DATA,
    ),
    route(
        "/kv/evict",
        kv.change("evict"),
        post("For operators: evict a prefix and its extensions", PrefixBody, {"id": "c0ffee00"}),
        fields=DATA,
    ),
    route(
        "/kv/export",
        kv.export_prefix,
        post(
            "For operators: export a prefix from disk to a file",
            ExportBody,
            {"id": "c0ffee00", "file": "system-prompt.kv"},
        ),
        fields=("object", "data", "file", "bytes"),
    ),
    route(
        "/kv/import",
        kv.import_prefix,
        post("For operators: import a file's blocks to disk", ImportBody, {"file": "system-prompt.kv"}),
        fields=("object", "data", "file"),
    ),
    route("/openapi.json", openapi, get("This document"), fields=("openapi", "paths")),
    route("/docs", docs, get("Interactive documentation"), content=HTML),
    route("/docs/{name}", docs_part, get("Files of the documentation page"), content=ANY),
)
