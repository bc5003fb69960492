"""What is asked of a server: our own prompts by task, and files that people bring."""

from dflash_deploy.bench.workloads.prompt import LANGUAGES, TASKS, Language, Message, Prompt, Role, Task
from dflash_deploy.bench.workloads.shipped import load, load_all, long_context

__all__ = [
    "LANGUAGES",
    "TASKS",
    "Language",
    "Message",
    "Prompt",
    "Role",
    "Task",
    "load",
    "load_all",
    "long_context",
]
