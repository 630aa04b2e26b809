"""Resolution of flags and model files into one frozen `EngineConfig`: `quintet.deploy.config.build.resolve`."""
