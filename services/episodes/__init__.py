"""Episodes of several turns: the policy talks with tools, an environment, or an agent.

::

    episodes ──▶ Worker ──▶ driver: environment class, tools or agent ──▶ Episode ──▶ rollouts
                                 messages │ ▲ answers                       │ ▲
                                 Renderer ▼ │ AnswerParser           Tree: exact token ids
                             rollout replica: token ids ──▶ token ids, logprobs, versions
"""
