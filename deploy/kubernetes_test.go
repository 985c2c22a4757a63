//go:build linux

package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/yaml"
)

// manifests are the objects of a directory, in the types of the API.
type manifests struct {
	namespaces []*corev1.Namespace
	services   []*corev1.Service
	configMaps []*corev1.ConfigMap
	budgets    []*policyv1.PodDisruptionBudget
	sets       []*appsv1.StatefulSet
}

// loadManifests decodes strictly: a field that the API does not have is an error, and
// so is one that stands twice.
func loadManifests(t *testing.T, files ...string) *manifests {
	t.Helper()
	m := &manifests{}
	for _, name := range files {
		data, err := os.ReadFile(filepath.Join(in.Repo, "deploy/kubernetes", name))
		if err != nil {
			t.Fatal(err)
		}
		for i, doc := range bytes.Split(data, []byte("\n---\n")) {
			var head struct {
				APIVersion string `json:"apiVersion"`
				Kind       string `json:"kind"`
			}
			if err := yaml.Unmarshal(doc, &head); err != nil {
				t.Fatalf("%s, object %d: %v", name, i, err)
			}
			var err error
			switch head.APIVersion + " " + head.Kind {
			case "v1 Namespace":
				err = decode(doc, &m.namespaces)
			case "v1 Service":
				err = decode(doc, &m.services)
			case "v1 ConfigMap":
				err = decode(doc, &m.configMaps)
			case "policy/v1 PodDisruptionBudget":
				err = decode(doc, &m.budgets)
			case "apps/v1 StatefulSet":
				err = decode(doc, &m.sets)
			default:
				err = fmt.Errorf("%s %s is not known here", head.APIVersion, head.Kind)
			}
			if err != nil {
				t.Fatalf("%s, object %d: %v", name, i, err)
			}
		}
	}
	return m
}

func decode[T any](doc []byte, list *[]*T) error {
	v := new(T)
	if err := yaml.UnmarshalStrict(doc, v); err != nil {
		return err
	}
	*list = append(*list, v)
	return nil
}

var variants = []string{"embedded", "external"}

func loadVariant(t *testing.T, variant string) *manifests {
	t.Helper()
	m := loadManifests(t, "namespace.yaml", variant+"/muster.yaml")
	if len(m.namespaces) != 1 || len(m.services) != 1 || len(m.budgets) != 1 || len(m.sets) != 1 {
		t.Fatalf("%s: %d namespaces, %d services, %d budgets, %d sets", variant, len(m.namespaces), len(m.services), len(m.budgets), len(m.sets))
	}
	return m
}

// TestManifests checks what the API's types cannot: that names meet.
func TestManifests(t *testing.T) {
	for _, variant := range variants {
		t.Run(variant, func(t *testing.T) {
			m := loadVariant(t, variant)
			set, service, budget := m.sets[0], m.services[0], m.budgets[0]
			for kind, namespace := range map[string]string{"set": set.Namespace, "service": service.Namespace, "budget": budget.Namespace} {
				if namespace != m.namespaces[0].Name {
					t.Errorf("the %s is in namespace %q", kind, namespace)
				}
			}
			pod := labels.Set(set.Spec.Template.Labels)
			for kind, selector := range map[string]map[string]string{
				"set": set.Spec.Selector.MatchLabels, "service": service.Spec.Selector, "budget": budget.Spec.Selector.MatchLabels} {
				if len(selector) == 0 || !labels.SelectorFromSet(selector).Matches(pod) {
					t.Errorf("the selector of the %s, %v, does not find the pods %v", kind, selector, pod)
				}
			}
			if set.Spec.ServiceName != service.Name || service.Spec.ClusterIP != corev1.ClusterIPNone || !service.Spec.PublishNotReadyAddresses {
				t.Error("pods have no names of their own before they are ready: want the set's service headless, with addresses that are not ready")
			}
			if set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement {
				t.Error("pods start one after the other, and the first waits for a quorum")
			}
			if got := budget.Spec.MaxUnavailable; got == nil || *got != intstr.FromInt32(1) {
				t.Errorf("the budget lets %v pods be away, want 1", got)
			}
			checkAntiAffinity(t, set, pod)
			checkPod(t, m, set, service)
		})
	}
}

func checkAntiAffinity(t *testing.T, set *appsv1.StatefulSet, pod labels.Set) {
	t.Helper()
	a := set.Spec.Template.Spec.Affinity.PodAntiAffinity
	terms := slices.Clone(a.RequiredDuringSchedulingIgnoredDuringExecution)
	for _, p := range a.PreferredDuringSchedulingIgnoredDuringExecution {
		terms = append(terms, p.PodAffinityTerm)
	}
	if len(terms) != 1 || terms[0].TopologyKey != corev1.LabelHostname ||
		!labels.SelectorFromSet(terms[0].LabelSelector.MatchLabels).Matches(pod) {
		t.Errorf("pods are not kept apart: %+v", terms)
	}
}

func checkPod(t *testing.T, m *manifests, set *appsv1.StatefulSet, service *corev1.Service) {
	t.Helper()
	spec := set.Spec.Template.Spec
	c := spec.Containers[0]
	if spec.EnableServiceLinks == nil || *spec.EnableServiceLinks {
		t.Error("the variables of the service, MUSTER_PORT and others, would be taken for settings")
	}
	ports := map[string]int32{}
	for _, p := range c.Ports {
		if errs := validation.IsValidPortName(p.Name); len(errs) > 0 {
			t.Errorf("port %s: %v", p.Name, errs)
		}
		ports[p.Name] = p.ContainerPort
	}
	for _, p := range service.Spec.Ports {
		if ports[p.TargetPort.StrVal] != p.Port {
			t.Errorf("port %s of the service goes to %s, which the pod has as %d", p.Name, p.TargetPort.String(), ports[p.TargetPort.StrVal])
		}
	}
	for kind, p := range map[string]*corev1.Probe{"startup": c.StartupProbe, "readiness": c.ReadinessProbe, "liveness": c.LivenessProbe} {
		if p == nil || p.HTTPGet == nil || ports[p.HTTPGet.Port.StrVal] == 0 {
			t.Errorf("%s probe: want a GET on a named port of the pod", kind)
		}
	}
	// The daemon gives up after two minutes, to be started again.
	if s := c.StartupProbe; s.FailureThreshold*s.PeriodSeconds < 120 {
		t.Error("a start is cut short")
	}

	volumes := map[string]bool{}
	for _, v := range spec.Volumes {
		volumes[v.Name] = true
	}
	for _, v := range set.Spec.VolumeClaimTemplates {
		volumes[v.Name] = true
	}
	for _, v := range c.VolumeMounts {
		if !volumes[v.Name] {
			t.Errorf("no volume %s", v.Name)
		}
		delete(volumes, v.Name)
	}
	for v := range volumes {
		t.Errorf("volume %s is not mounted", v)
	}
	checkEnv(t, m, set)
	checkRestricted(t, spec)
}

// checkEnv: files stand in volumes, addresses at ports that the pod has.
func checkEnv(t *testing.T, m *manifests, set *appsv1.StatefulSet) {
	t.Helper()
	c := set.Spec.Template.Spec.Containers[0]
	env := podEnv(t, m, set, 0)
	for name, value := range env {
		if strings.Contains(value, "$(") {
			t.Errorf("%s=%s: a reference to what is not set before", name, value)
		}
		if !strings.HasPrefix(value, "/") || name == "MUSTER_REGISTRY_ROOT" {
			continue
		}
		if !slices.ContainsFunc(c.VolumeMounts, func(v corev1.VolumeMount) bool {
			return value == v.MountPath || strings.HasPrefix(value, v.MountPath+"/")
		}) {
			t.Errorf("%s=%s is in no volume", name, value)
		}
	}
	if variant := env["MUSTER_ETCD_INITIAL_CLUSTER"]; variant != "" {
		var want []string
		for i := range *set.Spec.Replicas {
			want = append(want, fmt.Sprintf("%s=https://%s:2380", podName(set, i), podHost(set, i)))
		}
		if variant != strings.Join(want, ",") {
			t.Errorf("initial cluster %s, want %s", variant, strings.Join(want, ","))
		}
	}
	if got, want := env["MUSTER_ADVERTISE"], podHost(set, 0)+":9092"; got != want {
		t.Errorf("advertised as %s, want %s", got, want)
	}
}

// checkRestricted is the restricted profile of Kubernetes' own pod security standards,
// which the namespace enforces, and a root file system that nobody can write.
func checkRestricted(t *testing.T, spec corev1.PodSpec) {
	t.Helper()
	p, c := spec.SecurityContext, spec.Containers[0].SecurityContext
	is := func(b *bool, want bool) bool { return b != nil && *b == want }
	for what, ok := range map[string]bool{
		"runAsNonRoot":             is(p.RunAsNonRoot, true),
		"runAsUser":                p.RunAsUser != nil && *p.RunAsUser != 0,
		"seccompProfile":           p.SeccompProfile != nil && p.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault,
		"allowPrivilegeEscalation": is(c.AllowPrivilegeEscalation, false),
		"readOnlyRootFilesystem":   is(c.ReadOnlyRootFilesystem, true),
		"capabilities":             slices.Equal(c.Capabilities.Drop, []corev1.Capability{"ALL"}) && len(c.Capabilities.Add) == 0,
		"automount":                is(spec.AutomountServiceAccountToken, false),
		"host namespaces":          !spec.HostNetwork && !spec.HostPID && !spec.HostIPC,
	} {
		if !ok {
			t.Errorf("not restricted: %s", what)
		}
	}
}

func podName(set *appsv1.StatefulSet, i int32) string { return fmt.Sprintf("%s-%d", set.Name, i) }

// podHost is a name of the pod that the cluster's DNS knows, whatever its domain.
func podHost(set *appsv1.StatefulSet, i int32) string {
	return fmt.Sprintf("%s.%s.%s.svc", podName(set, i), set.Spec.ServiceName, set.Namespace)
}

// podEnv is the environment that kubelet gives the i-th pod: what ConfigMaps say, then
// the list in its order, each value with references to what stands before it.
func podEnv(t *testing.T, m *manifests, set *appsv1.StatefulSet, i int32) map[string]string {
	t.Helper()
	c := set.Spec.Template.Spec.Containers[0]
	env := map[string]string{}
	for _, from := range c.EnvFrom {
		at := slices.IndexFunc(m.configMaps, func(c *corev1.ConfigMap) bool { return c.Name == from.ConfigMapRef.Name })
		if at < 0 {
			t.Fatalf("no ConfigMap %s", from.ConfigMapRef.Name)
		}
		maps.Copy(env, m.configMaps[at].Data)
	}
	for _, e := range c.Env {
		value := e.Value
		for name, v := range env {
			value = strings.ReplaceAll(value, "$("+name+")", v)
		}
		if e.ValueFrom != nil {
			switch path := e.ValueFrom.FieldRef.FieldPath; path {
			case "metadata.name":
				value = podName(set, i)
			case "metadata.labels['" + appsv1.PodIndexLabel + "']":
				value = fmt.Sprint(i)
			default:
				t.Fatalf("%s: field %s is not known here", e.Name, path)
			}
		}
		env[e.Name] = value
	}
	return env
}
