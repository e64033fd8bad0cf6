# Sets up, tests and demonstrates lingbot_map_ros on a machine without a ROS installation.
# With a sourced ROS distribution, use colcon instead: see README.md.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SHARE := $(VENV)/share
PIP := $(BIN)/python -m pip --disable-pip-version-check

DEMO_BAG := lingbot_map/data/room

# Variables of the calling shell that would break .venv. The last one is the guard that the ROS wheels
# of another .venv set.
unexport PYTHONPATH PYTHONHOME AMENT_PREFIX_PATH CMAKE_PREFIX_PATH COLCON_PREFIX_PATH
unexport LD_LIBRARY_PATH _ROS_WHEELS_BOOTSTRAP_COMPLETE

# Two workers; one worker runs all tests of a file, because they share slow fixtures.
WORKERS := -n 2 --dist loadfile

.PHONY: help setup test test-slow lint demo clean no-distribution

help:
	@echo 'make setup      create $(VENV): ROS 2 Jazzy wheels, torch, the underlay, this package'
	@echo 'make demo       map a room from the packaged recording into results/demo'
	@echo 'make test       run the tests (ARGS="-k depth" passes arguments on to pytest)'
	@echo 'make test-slow  run the tests that take longer than 20 s each (not those for CUDA)'
	@echo 'make lint       check the style with ruff'
	@echo 'make clean      remove $(VENV) and the caches; results/ stays'

setup: $(VENV)/.package-installed
	@echo 'make setup: $(VENV) is ready'

demo: setup
	$(BIN)/lingbot_map_replay $(DEMO_BAG) --params config/demo.yaml --out results/demo
	@echo 'make demo: look at results/demo/map.png'

test: setup
	$(BIN)/python -m pytest $(WORKERS) $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest $(WORKERS) -m 'slow and not cuda' $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build install log *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

no-distribution:
	@if [ -n "$$ROS_DISTRO" ]; then \
	  echo "make: ROS 2 $$ROS_DISTRO is sourced: use 'colcon build' and 'colcon test', or a shell without it" >&2; \
	  exit 1; fi

$(VENV)/.requirements-installed: $(wildcard requirements/*.txt) | no-distribution
	@sh requirements/check_machine.sh $(PYTHON)
	@echo 'make setup: creating $(VENV) with ROS 2 Jazzy and torch (some minutes, 2 to 6 GB of disk)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c requirements/constraints.txt -r requirements/ros-jazzy.txt
	$(PIP) install --quiet -c requirements/constraints.txt -r requirements/torch.txt
	$(PIP) install --quiet -c requirements/constraints.txt \
	  -r requirements/base.txt -r requirements/test.txt
	@touch $@

$(VENV)/.underlay-built: $(VENV)/.requirements-installed $(wildcard underlay/*.sh underlay/tf2_msgs/* underlay/tf2_msgs/msg/*)
	@echo 'make setup: generating tf2_msgs and adding the underlay to $(VENV)'
	sh underlay/install.sh $(VENV)
	@touch $@

# Editable: the sources are used in place. pip does not install the files that ament looks up in
# share/, so link them. --use-pep517: without it, an older pip installs the programs where setup.cfg
# puts them for ament.
$(VENV)/.package-installed: $(VENV)/.underlay-built setup.py setup.cfg Makefile | no-distribution
	@echo 'make setup: installing lingbot_map_ros into $(VENV)'
	$(PIP) install --quiet --no-deps --no-build-isolation --use-pep517 --editable .
	test -x $(BIN)/lingbot_map_node
	mkdir -p $(SHARE)/lingbot_map_ros $(SHARE)/ament_index/resource_index/packages
	ln -sfn "$(CURDIR)/config" "$(CURDIR)/launch" "$(CURDIR)/package.xml" $(SHARE)/lingbot_map_ros/
	ln -sfn "$(CURDIR)/resource/lingbot_map_ros" $(SHARE)/ament_index/resource_index/packages/
	@touch $@
