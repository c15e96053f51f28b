"""A plugin for tests: makes one of flowlib's hooks fail to apply, which SGLang only logs."""

TARGET = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._build_oot_mha_kv_pool"


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry._apply_target.__func__

    def apply(cls, target, hooks):
        if target == TARGET:
            raise RuntimeError("lost on purpose")
        original(cls, target, hooks)

    HookRegistry._apply_target = classmethod(apply)
