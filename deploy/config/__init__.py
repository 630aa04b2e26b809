"""From flags and a model folder to one frozen `EngineConfig`: see `quintet.deploy.config.build.resolve`."""
