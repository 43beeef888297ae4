"""The ground that kernels are tested on without a GPU: interpreter number types, a sanitizer, compile-only runs, a lint."""
