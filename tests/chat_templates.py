"""Chat templates written for the tests after families in use: tools, tool calls, reasoning kept apart.

Each is shorter than its model, but keeps what makes borders hard to find.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from text_helpers import byte_tokenizer

# As Qwen3: tools in the system turn, calls in XML, tool replies inside a user turn, reasoning only after the last
# question, an empty think block where there is none.
QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}{{- '<tools>' }}"
    "{%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}"
    "{%- elif messages[0].role == 'system' %}"
    "{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant' }}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{- '\n' + content }}{%- endif %}"
    "{%- for call in m.tool_calls or [] %}{%- if (loop.first and content) or not loop.first %}{{- '\n' }}{%- endif %}"
    "{%- set call = call.function if call.function else call %}"
    '{{- \'<tool_call>\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
# As Qwen3.5: the prompt itself opens the think block.
QWEN35 = QWEN3.replace(
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}"
    "{%- else %}{{- '<think>\n' }}{%- endif %}",
)
# As gpt-oss: channels, reasoning under its own name and gone from the history, a call ends otherwise than an answer.
HARMONY = (
    "{{- '<|start|>system<|message|>Reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- set ns = namespace(name='') %}"
    "{%- if tools or messages[0].role in ['system', 'developer'] %}{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role in ['system', 'developer'] %}"
    "{{- '# Instructions\n\n' + messages[0].content + '\n\n' }}{%- endif %}"
    "{%- for tool in tools or [] %}{{- 'type ' + tool.function.name + '\n' }}{%- endfor %}{{- '<|end|>' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- m.content | tojson }}{{- '<|end|>' }}"
    "{%- elif m.role == 'assistant' and m.tool_calls %}"
    "{%- if m.content and m.thinking %}{{- raise_exception('Cannot pass both content and thinking') }}{%- endif %}"
    "{%- if m.content or m.thinking %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}{%- endif %}"
    "{%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- call.arguments | tojson }}{{- '<|call|>' }}"
    "{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}"
    "{%- if 'thinking' in m %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}"
    "{%- endif %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"
)
# As Llama-3.1: a lone call is the whole reply, the tool's text is quoted, the roles have headers.
LLAMA31 = (
    "{{- '<|begin_of_text|>' }}{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}"
    "{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{- raise_exception('only single tool-calls at once') }}{%- endif %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- set call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
# As SmolLM3: marks what is generated, for transformers' own mask of assistant tokens.
MARKED = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant\n' }}"
    "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)

_CHATML_TOKENS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
_LLAMA_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
TEMPLATES: dict[str, tuple[str, list[str], list[str]]] = {  # template, special tokens, those that end a turn
    "qwen3": (QWEN3, _CHATML_TOKENS, ["<|im_end|>"]),
    "qwen35": (QWEN35, _CHATML_TOKENS, ["<|im_end|>"]),
    "harmony": (HARMONY, _HARMONY_TOKENS, ["<|return|>", "<|call|>"]),
    "llama31": (LLAMA31, _LLAMA_TOKENS, ["<|eot_id|>"]),
    "marked": (MARKED, _CHATML_TOKENS, ["<|im_end|>"]),
}


def target_of(name: str) -> tuple[PreTrainedTokenizerFast, set[int]]:
    """A tokenizer with the template, and its stop ids."""
    template, specials, ends = TEMPLATES[name]
    tokenizer = byte_tokenizer(template, specials)
    return tokenizer, set(tokenizer.convert_tokens_to_ids(ends))
